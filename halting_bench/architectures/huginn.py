"""Huginn (Geiping et al., arXiv 2502.05171): prelude, one looped core with an input adapter, coda.

Loads the public `huginn_raven` layout: the public config keys and tensor names.
Shapes: `*` row dimensions, D width, H heads, E = D / H, M MLP width, V padded vocabulary.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import Flops, LoopSpec, ModelSpec, RecurrentModel, rms_norm
from halting_bench.errors import UserError

REQUIRED_KEYS = (
    "n_embd", "n_heads", "n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda",
    "intermediate_size", "block_size", "padded_vocab_size", "mean_recurrence", "norm_eps", "rope_base",
)  # fmt: skip


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rotate_adjacent(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on the adjacent pairs (2i, 2i+1). x: [*, H, E]; cos, sin: [*, 1, E/2], at least float32."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, biased: bool):
        super().__init__()
        self.heads = heads
        self.Wqkv = nn.Linear(width, 3 * width, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, heads, width // heads)) if biased else None
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, context: AttentionContext) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.Wqkv(x).chunk(3, dim=-1))
        if self.qk_bias is not None:
            q, k = q + self.qk_bias[0, 0], k + self.qk_bias[1, 0]
        q, k = rotate_adjacent(q, *rotary), rotate_adjacent(k, *rotary)
        return self.proj(context.attend(layer, q, k, v).flatten(-2))


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc = nn.Linear(width, 2 * hidden, bias=False)
        self.proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class SandwichBlock(nn.Module):
    """x <- norm_2(attn(norm_1(x)) + x); x <- norm_4(mlp(norm_3(x)) + x)."""

    def __init__(self, width: int, heads: int, hidden: int, eps: float, biased: bool):
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(width, eps), RMSNorm(width, eps)
        self.norm_3, self.norm_4 = RMSNorm(width, eps), RMSNorm(width, eps)
        self.attn = Attention(width, heads, biased)
        self.mlp = GatedMLP(width, hidden)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, context: AttentionContext) -> Tensor:
        x = self.norm_2(self.attn(self.norm_1(x), rotary, layer, context) + x)
        return self.norm_4(self.mlp(self.norm_3(x)) + x)


class Huginn(RecurrentModel):
    def __init__(self, config: dict):
        """Args: config: the parsed public config.json. Raises UserError when a needed key is missing."""
        super().__init__()
        missing = [key for key in REQUIRED_KEYS if key not in config]
        if missing:
            raise UserError(f"config.json of a huginn_raven model lacks {', '.join(missing)}: add them from the public config")
        self.config = config
        width, heads, vocab = config["n_embd"], config["n_heads"], config["padded_vocab_size"]
        prelude, core, coda = (config[f"n_layers_in_{part}"] for part in ("prelude", "recurrent_block", "coda"))
        shape = (width, heads, config["intermediate_size"], config["norm_eps"], bool(config.get("qk_bias", False)))
        self.spec = ModelSpec(
            family="huginn_raven",
            width=width,
            vocab_size=vocab,
            max_length=config["block_size"],
            mean_recurrence=config["mean_recurrence"],
            loops=(LoopSpec("core", core, random_start=config.get("state_init", "like-init") != "zero"),),
            layers=prelude + core + coda,
            heads=heads,
            kv_heads=heads,
            head_width=width // heads,
        )
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab, width),
            "prelude": nn.ModuleList(SandwichBlock(*shape) for _ in range(prelude)),
            "adapter": nn.Linear(2 * width, width, bias=bool(config.get("bias", False))),
            "core_block": nn.ModuleList(SandwichBlock(*shape) for _ in range(core)),
            "coda": nn.ModuleList(SandwichBlock(*shape) for _ in range(coda)),
            "ln_f": RMSNorm(width, config["norm_eps"]),
        })
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if config.get("tie_embeddings", True):
            self.lm_head.weight = self.transformer["wte"].weight
        self.embed_scale = math.sqrt(width)
        self.state_std = math.sqrt(2 / (5 * width)) * self.embed_scale
        self._rotary_table: tuple[Tensor, Tensor] | None = None

    def rotary(self, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """cos and sin of the rows' positions, [*, 1, E/2]; float32, or float64 when the model is."""
        weight = self.lm_head.weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        table = self._rotary_table
        if table is None or table[0].dtype != dtype or table[0].device != weight.device:
            half = torch.arange(0, self.spec.head_width, 2, device=weight.device).to(dtype)
            frequency = 1.0 / self.config["rope_base"] ** (half / self.spec.head_width)
            angle = torch.outer(torch.arange(self.spec.max_length, device=weight.device).to(dtype), frequency)
            table = self._rotary_table = (angle.cos(), angle.sin())
        return table[0][context.positions].unsqueeze(-2), table[1][context.positions].unsqueeze(-2)

    def _blocks(self, stage: str, first: int, x: Tensor, context: AttentionContext) -> Tensor:
        rotary = self.rotary(context)
        for offset, block in enumerate(self.transformer[stage]):  # type: ignore[arg-type]
            x = block(x, rotary, first + offset, context)
        return x

    def embed(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        return self._blocks("prelude", 0, self.transformer["wte"](tokens) * self.embed_scale, context)

    def begin(self, loop: int, x: Tensor, noise: Tensor | None) -> Tensor:
        return torch.zeros_like(x) if noise is None else noise.to(x) * self.state_std

    def step(self, loop: int, state: Tensor, x: Tensor, context: AttentionContext) -> Tensor:
        mixed = self.transformer["adapter"](torch.cat((state, x), dim=-1))
        return self._blocks("core_block", len(self.transformer["prelude"]), mixed, context)  # type: ignore[arg-type]

    def end(self, loop: int, state: Tensor, context: AttentionContext) -> Tensor:
        return state

    def readout(self, x: Tensor, context: AttentionContext) -> Tensor:
        norm = self.transformer["ln_f"]
        first = self.spec.layers - len(self.transformer["coda"])  # type: ignore[arg-type]
        return self.lm_head(norm(self._blocks("coda", first, norm(x), context)))

    def costs(self) -> dict[str, Flops]:
        d, hidden = self.spec.width, self.config["intermediate_size"]
        block = Flops(fixed=2 * (4 * d * d + 3 * d * hidden), per_context=4 * d)
        count = [self.config[f"n_layers_in_{part}"] for part in ("prelude", "recurrent_block", "coda")]
        return {
            "embed": Flops(block.fixed * count[0], block.per_context * count[0]),
            "step/0": Flops(block.fixed * count[1] + 4 * d * d, block.per_context * count[1]),
            "readout": Flops(block.fixed * count[2] + 2 * d * self.spec.vocab_size, block.per_context * count[2]),
        }
