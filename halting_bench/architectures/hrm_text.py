"""HRM-Text (Sapient): a slow state z_H and a fast state z_L, each with its own stack of layers.

A high cycle is one loop here: its steps apply the L stack to z_L + z_H, and its end applies the H stack to z_H + z_L.
Both states travel together, [*, 2D]: z_L first, which is what moves inside a loop. The K/V of a stack in another cycle
is another one, so each cycle numbers its layers anew.
Shapes: `*` row dimensions, D width of one state.
"""

from typing import Any

import torch
from torch import Tensor, nn

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import Flops, LoopSpec, ModelSpec
from halting_bench.architectures.config import Config, layer_count, whole
from halting_bench.architectures.transformers_backed import TransformersModel, linear_flops, positions_of


class HrmText(TransformersModel):
    library_class = "HrmTextForCausalLM"

    def __init__(self, inner: Any):
        """Args: inner: the library's model."""
        super().__init__()
        self.inner = inner
        config = inner.config
        self.depth = config.num_layers_per_stack
        self.spec = ModelSpec(
            family="hrm_text",
            width=2 * config.hidden_size,
            vocab_size=config.vocab_size,
            max_length=config.max_position_embeddings,
            mean_recurrence=config.L_cycles,
            loops=tuple(LoopSpec(f"cycle-{h + 1}", self.depth, random_start=False) for h in range(config.H_cycles)),
            layers=2 * self.depth * config.H_cycles,
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            head_width=config.head_dim,
            fixed_recurrence=True,
        )

    @classmethod
    def check(cls, config: Config) -> None:
        layer_count(config, "num_hidden_layers")
        for key in ("H_cycles", "L_cycles"):
            whole(config, key, 1)

    def _stack(self, stack: Any, first: int, x: Tensor, context: AttentionContext) -> Tensor:
        angles = self.inner.model.rotary_emb(x, positions_of(context))
        for offset, layer in enumerate(stack.layers):
            x = self.run(layer, x, context, number=first + offset, position_embeddings=angles)
        return stack.final_norm(x)

    def embed(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        body = self.inner.model
        slow = body.embed_tokens(tokens) * body.embedding_scale
        return torch.cat((body.z_L_init.to(slow).expand_as(slow), slow), dim=-1)

    def begin(self, loop: int, x: Tensor, noise: Tensor | None) -> Tensor:
        return x

    def step(self, loop: int, state: Tensor, x: Tensor, context: AttentionContext) -> Tensor:
        fast, slow = state.chunk(2, dim=-1)
        fast = self._stack(self.inner.model.L_module, 2 * self.depth * loop, fast + slow, context)
        return torch.cat((fast, slow), dim=-1)

    def end(self, loop: int, state: Tensor, context: AttentionContext) -> Tensor:
        fast, slow = state.chunk(2, dim=-1)
        slow = self._stack(self.inner.model.H_module, 2 * self.depth * loop + self.depth, slow + fast, context)
        return torch.cat((fast, slow), dim=-1)

    def readout(self, x: Tensor, context: AttentionContext) -> Tensor:
        return self.inner.lm_head(x.chunk(2, dim=-1)[1])

    def costs(self) -> dict[str, Flops]:
        """The H stack runs once a cycle at any depth: the last one is counted with the readout, the others with embed."""
        attention = 4.0 * self.spec.heads * self.spec.head_width * self.depth

        def stack(module: nn.Module, times: int = 1, head: float = 0) -> Flops:
            return Flops(linear_flops([module]) * times + head, attention * times)

        cycles, body = len(self.spec.loops), self.inner.model
        steps = {f"step/{loop}": stack(body.L_module) for loop in range(cycles)}
        return {
            "embed": stack(body.H_module, cycles - 1),
            **steps,
            "readout": stack(body.H_module, head=linear_flops([self.inner.lm_head])),
        }
