"""Huginn (Geiping et al., arXiv 2502.05171): prelude, one looped core with an input adapter, coda.

Loads the public `huginn_raven` layouts: Huginn-0125, and the Llama, TinyLlama and OLMo-2 checkpoints retrofitted with
recurrence (McLeish et al., arXiv 2511.07384), which keep their parent's block.
Shapes: `*` row dimensions, D width, H heads, G key/value heads, E head width, M MLP width, V padded vocabulary.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import Flops, LoopSpec, ModelSpec, RecurrentModel
from halting_bench.architectures.config import Config, layer_count, need, real, refuse, whole
from halting_bench.architectures.layers import RMSNorm, Rotary, block_flops, halting_probability, rotate_halves

REQUIRED_KEYS = (
    "n_embd", "n_heads", "n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda",
    "intermediate_size", "block_size", "mean_recurrence", "norm_eps", "rope_base",
)  # fmt: skip
START_MODES = ("random", "embed-init", "skip-adapter")
"""s_0 is noise; the embedded input e; or e, with the first core step taken on e itself instead of through the adapter."""


Angles = tuple[Tensor, ...]
"""What turns a row's queries and keys: one complex tensor for adjacent pairs, cosines and sines for halves."""


def rotate_adjacent(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary embedding on the adjacent pairs (2i, 2i+1). x: [*, H, E]; turn: complex [*, 1, E/2], of float32 or float64."""
    pairs = torch.view_as_complex(x.to(turn.dtype.to_real()).view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


@dataclass(frozen=True)
class Shape:
    """What a block is built from."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    eps: float
    qk_bias: bool


class Attention(nn.Module):
    def __init__(self, shape: Shape, *, adjacent: bool, qk_norm: bool):
        """Args: adjacent: rotate adjacent pairs, not halves. qk_norm: normalise all queries, and all keys, of a row."""
        super().__init__()
        self.shape = shape
        self.rotate = rotate_adjacent if adjacent else rotate_halves
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.Wqkv = nn.Linear(shape.width, queries + 2 * keys, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, shape.heads, shape.head_width)) if shape.qk_bias else None
        self.q_norm = RMSNorm(queries, shape.eps) if qk_norm else None
        self.k_norm = RMSNorm(keys, shape.eps) if qk_norm else None
        self.proj = nn.Linear(queries, shape.width, bias=False)

    def project(self, x: Tensor, rotary: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [*, H, E], rotated keys and values [*, G, E] of a layer's input."""
        queries, keys = self.shape.heads, self.shape.kv_heads
        heads = F.linear(x, self.Wqkv.weight).view(*x.shape[:-1], -1, self.shape.head_width)
        qk, v = torch.split_with_sizes(heads, (queries + keys, keys), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (part.flatten(-2) for part in qk.split((queries, keys), dim=-2))
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-1).view_as(qk)
        if self.qk_bias is not None:
            qk = qk + self.qk_bias.view(-1, self.shape.head_width)
        q, k = torch.split_with_sizes(self.rotate(qk, *rotary), (queries, keys), dim=-2)
        return q, k, v

    def forward(self, x: Tensor, rotary: Angles, layer: int, context: AttentionContext) -> Tensor:
        return F.linear(context.attend(layer, *self.project(x, rotary)).flatten(-2), self.proj.weight)


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc = nn.Linear(width, 2 * hidden, bias=False)
        self.proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.fc.weight).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.proj.weight)


class SandwichBlock(nn.Module):
    """Huginn: x <- norm_2(attn(norm_1(x)) + x); x <- norm_4(mlp(norm_3(x)) + x)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(shape.width, shape.eps), RMSNorm(shape.width, shape.eps)
        self.norm_3, self.norm_4 = RMSNorm(shape.width, shape.eps), RMSNorm(shape.width, shape.eps)
        self.attn = Attention(shape, adjacent=True, qk_norm=False)
        self.mlp = GatedMLP(shape.width, shape.hidden)

    def forward(self, x: Tensor, rotary: Angles, layer: int, context: AttentionContext) -> Tensor:
        x = self.norm_2.forward(self.attn.forward(self.norm_1.forward(x), rotary, layer, context) + x)
        return self.norm_4.forward(self.mlp.forward(self.norm_3.forward(x)) + x)


class PreNormBlock(nn.Module):
    """Retrofitted Llama: x <- attn(norm_1(x)) + x; x <- mlp(norm_2(x)) + x."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(shape.width, shape.eps), RMSNorm(shape.width, shape.eps)
        self.attn = Attention(shape, adjacent=False, qk_norm=False)
        self.mlp = GatedMLP(shape.width, shape.hidden)

    def forward(self, x: Tensor, rotary: Angles, layer: int, context: AttentionContext) -> Tensor:
        x = self.attn.forward(self.norm_1.forward(x), rotary, layer, context) + x
        return self.mlp.forward(self.norm_2.forward(x)) + x


class PostNormBlock(nn.Module):
    """Retrofitted OLMo-2: x <- norm_1(attn(x)) + x; x <- norm_2(mlp(x)) + x; queries and keys normalised."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(shape.width, shape.eps), RMSNorm(shape.width, shape.eps)
        self.attn = Attention(shape, adjacent=False, qk_norm=True)
        self.mlp = GatedMLP(shape.width, shape.hidden)

    def forward(self, x: Tensor, rotary: Angles, layer: int, context: AttentionContext) -> Tensor:
        x = self.norm_1.forward(self.attn.forward(x, rotary, layer, context)) + x
        return self.norm_2.forward(self.mlp.forward(x)) + x


BLOCKS: dict[str, type[nn.Module]] = {"sandwich": SandwichBlock, "pre-norm": PreNormBlock, "post-norm": PostNormBlock}


class Huginn(RecurrentModel):
    def __init__(self, config: Config, block: str = "sandwich"):
        """
        Args:
            config: the parsed public config.json.
            block: a key of BLOCKS.

        Raises:
            UserError: a key is missing or out of range.
        """
        super().__init__()
        need(config, "huginn_raven", REQUIRED_KEYS)
        refuse(config, "huginn_raven", "injection_type", "linear")
        refuse(config, "huginn_raven", "initial_state_mode", *START_MODES)
        refuse(config, "huginn_raven", "test_time_noise", 0)
        refuse(config, "huginn_raven", "halting_head", False, True)
        self.retrofitted = block != "sandwich"
        width, heads = whole(config, "n_embd"), whole(config, "n_heads")
        vocab = whole(config, "padded_vocab_size" if "padded_vocab_size" in config else "vocab_size")
        prelude = layer_count(config, "n_layers_in_prelude", least=0)
        core = layer_count(config, "n_layers_in_recurrent_block")
        coda = layer_count(config, "n_layers_in_coda", least=0)
        shape = Shape(
            width=width,
            heads=heads,
            kv_heads=whole(config, "num_key_value_heads", heads),
            head_width=whole(config, "head_dim", width // heads),
            hidden=whole(config, "intermediate_size"),
            eps=real(config, "norm_eps"),
            qk_bias=bool(config.get("qk_bias", False)),
        )
        self.start = str(config.get("initial_state_mode", "random"))
        drawn = self.start == "random" and config.get("state_init", "like-init") != "zero"
        length = whole(config, "block_size")
        self.spec = ModelSpec(
            family="huginn_raven",
            width=width,
            vocab_size=vocab,
            max_length=whole(config, "max_position_embeddings", length) if self.retrofitted else length,
            mean_recurrence=whole(config, "mean_recurrence"),
            loops=(LoopSpec("core", core, random_start=drawn),),
            layers=prelude + core + coda,
            heads=heads,
            kv_heads=shape.kv_heads,
            head_width=shape.head_width,
            has_gate=bool(config.get("halting_head", False)),
        )
        make, embedding = BLOCKS[block], nn.Embedding(vocab, width)
        self.transformer = nn.ModuleDict(
            {
                "wte": embedding,
                "prelude": nn.ModuleList(make(shape) for _ in range(prelude)),
                "adapter": nn.Linear(2 * width, width, bias=bool(config.get("bias", False))),
                "core_block": nn.ModuleList(make(shape) for _ in range(core)),
                "coda": nn.ModuleList(make(shape) for _ in range(coda)),
                "ln_f": RMSNorm(width, shape.eps),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if config.get("tie_embeddings", True):
            self.lm_head.weight = embedding.weight
        self.halting_head = nn.Linear(width, 1) if self.spec.has_gate else None  # ours: no public checkpoint has one
        init = config.get("init_values")
        init = init if isinstance(init, dict) else {}
        self.embed_scale = real(init, "embed_scale", math.sqrt(width))
        self.state_std = real(init, "std", math.sqrt(2 / (5 * width))) * self.embed_scale
        self.layers_of = {"prelude": prelude, "core_block": core, "coda": coda}
        self.block_cost = block_flops(width, heads, shape.kv_heads, shape.head_width, shape.hidden)
        if self.retrofitted:
            self.angles = Rotary.from_config({"rope_theta": config["rope_base"], **config}, shape.head_width)
        else:
            self.angles = Rotary(shape.head_width, real(config, "rope_base"), None)
        self._rotary_table: Angles | None = None

    @classmethod
    def build(cls, config: dict, tensors: Collection[str]) -> Self:
        """The config does not say whose block it is: the tensors do."""
        names = {name.rpartition("core_block.0.")[2] for name in tensors if ".core_block.0." in name}
        if "norm_3.weight" in names or not names:
            return cls(config)
        return cls(config, block="post-norm" if "attn.q_norm.weight" in names else "pre-norm")

    def rotary(self, context: AttentionContext) -> Angles:
        """The angles of the rows' positions, [*, 1, E/2]; float32, or float64 when the model is."""
        weight = self.lm_head.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        table = self._rotary_table
        if table is None or table[0].dtype.to_real() != dtype or table[0].device != weight.device:
            cos, sin = self.angles.at(torch.arange(self.spec.max_length, device=weight.device), weight)
            table = self._rotary_table = (cos, sin) if self.retrofitted else (torch.complex(cos, sin),)
        return tuple(part[context.positions] for part in table)

    def _blocks(self, stage: str, first: int, x: Tensor, context: AttentionContext) -> Tensor:
        rotary = self.rotary(context)
        for offset, block in enumerate(cast(nn.ModuleList, self.transformer[stage])):
            x = block.forward(x, rotary, first + offset, context)
        return x

    def embed(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        return self._blocks("prelude", 0, self.transformer["wte"](tokens) * self.embed_scale, context)

    def begin(self, loop: int, x: Tensor, noise: Tensor | None) -> Tensor:
        if self.start != "random":
            return x
        return torch.zeros_like(x) if noise is None else noise.to(x) * self.state_std

    def step(self, loop: int, state: Tensor, x: Tensor, context: AttentionContext) -> Tensor:
        mixed = self.transformer["adapter"](torch.cat((state, x), dim=-1))
        if self.start == "skip-adapter":  # s_0 is e, and only s_0: so a row that has not begun is known by its state
            mixed = torch.where((state == x).all(dim=-1, keepdim=True), x, mixed)
        return self._blocks("core_block", self.layers_of["prelude"], mixed, context)

    def keys_values(self, loop: int, state: Tensor, context: AttentionContext) -> dict[int, tuple[Tensor, Tensor]]:
        rotary, found = self.rotary(context), {}
        for layer, block in enumerate(cast(nn.ModuleList, self.transformer["core_block"]), self.layers_of["prelude"]):
            normed = state if isinstance(block, PostNormBlock) else cast(nn.Module, block.norm_1)(state)
            found[layer] = cast(Attention, block.attn).project(normed, rotary)[1:]
        return found

    def end(self, loop: int, state: Tensor, context: AttentionContext) -> Tensor:
        return state

    def readout(self, x: Tensor, context: AttentionContext) -> Tensor:
        norm = self.transformer["ln_f"]
        first = self.layers_of["prelude"] + self.layers_of["core_block"]
        return self.lm_head(norm(self._blocks("coda", first, x if self.retrofitted else norm(x), context)))

    def gate(self, state: Tensor) -> Tensor:
        return super().gate(state) if self.halting_head is None else halting_probability(self.halting_head, state)

    def costs(self) -> dict[str, Flops]:
        width, block, count = self.spec.width, self.block_cost, self.layers_of
        return {
            "embed": Flops(block.fixed * count["prelude"], block.per_context * count["prelude"]),
            "step/0": Flops(block.fixed * count["core_block"] + 4 * width * width, block.per_context * count["core_block"]),
            "readout": Flops(block.fixed * count["coda"] + 2 * width * self.spec.vocab_size, block.per_context * count["coda"]),
        }
