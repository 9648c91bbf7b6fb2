"""Ouro (ByteDance, arXiv 2510.25741): the whole stack looped, its final norm inside the loop, and a learned halting gate.

Shapes: `*` row dimensions, D width.
"""

from typing import cast

import torch
from torch import Tensor, nn

from halting_bench.architectures.attention import AttentionContext, DenseContext
from halting_bench.architectures.config import Config, real, whole
from halting_bench.architectures.layers import GroupedAttention, RMSNorm, SwiGLU, halting_probability
from halting_bench.architectures.stack import LoopedStack, checked


class OuroLayer(nn.Module):
    """x <- x + norm(attn(norm(x))); x <- x + norm(mlp(norm(x)))."""

    def __init__(self, config: Config):
        super().__init__()
        width, heads, eps = whole(config, "hidden_size"), whole(config, "num_attention_heads"), real(config, "rms_norm_eps")
        self.input_layernorm, self.input_layernorm_2 = RMSNorm(width, eps), RMSNorm(width, eps)
        self.post_attention_layernorm, self.post_attention_layernorm_2 = RMSNorm(width, eps), RMSNorm(width, eps)
        head_width = whole(config, "head_dim", width // heads)
        self.self_attn = GroupedAttention(width, heads, whole(config, "num_key_value_heads", heads), head_width)
        self.mlp = SwiGLU(width, whole(config, "intermediate_size"))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, context: AttentionContext) -> Tensor:
        x = x + self.input_layernorm_2(self.self_attn(self.input_layernorm(x), rotary, layer, context))
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class Ouro(LoopedStack):
    def __init__(self, config: Config):
        """Args: config: the parsed public config.json. Raises UserError when a key is missing or out of range."""
        checked(config, "ouro", "total_ut_steps")
        super().__init__(config, family="ouro", loops_key="total_ut_steps", layer=lambda: OuroLayer(config), has_gate=True)
        self.model["early_exit_gate"] = nn.Linear(self.spec.width, 1)

    def step(self, loop: int, state: Tensor, x: Tensor, context: AttentionContext) -> Tensor:
        return self.model["norm"](self.layers(state, context))

    def end(self, loop: int, state: Tensor, context: AttentionContext) -> Tensor:
        return state

    def gate(self, state: Tensor) -> Tensor:
        return halting_probability(cast(nn.Linear, self.model["early_exit_gate"]), state)

    def weighted_exit(self, tokens: Tensor) -> Tensor:
        """The mean of all loops' logits under the gate's distribution of exits, the last loop taking what is left.

        It runs every loop and so saves nothing: a ceiling to compare exits with. tokens: int64 [B, T] -> [B, T, V].
        """
        context = DenseContext(tokens.shape[1], device=tokens.device)
        state = x = self.embed(tokens, context)
        for k in range(1, self.spec.mean_recurrence + 1):
            state = self.step(0, state, x, context)
            logits = self.readout(state, context)
            gate = self.gate(state).unsqueeze(-1)
            if k == 1:
                left, mean = torch.ones_like(gate), torch.zeros_like(logits, dtype=gate.dtype)
            share = left if k == self.spec.mean_recurrence else left * gate
            mean, left = mean + share * logits, left - share
        return mean
