"""A decoder with several looped groups between plain layers ("Two-Scale Latent Dynamics", Pappone et al., arXiv 2509.23314).

Plain layers, a looped group, plain layers, the next group, ..., plain layers, head. The paper's model is GPT-2 with layer 4,
layers 5-6 and layer 7 looped and has no public code; here the residual layout is GPT-2's (pre-norm), with RMSNorm, a gated
MLP and rotary positions. A group starts from its input, s_0 = x, and steps either on the plain residual stream
(`injection` "none", the paper's) or on a learned mixture of state and input ("gate", ours), which contracts.
Shapes: `*` row dimensions, D width.
"""

from typing import cast

import torch
from torch import Tensor, nn

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import Flops, LoopSpec, ModelSpec, RecurrentModel
from halting_bench.architectures.config import MAX_LAYERS, Config, need, real, refuse, whole
from halting_bench.architectures.huginn import Attention, PreNormBlock, Shape
from halting_bench.architectures.layers import RMSNorm, Rotary, block_flops
from halting_bench.errors import UserError

FAMILY = "two_scale"
REQUIRED_KEYS = (
    "vocab_size", "n_embd", "n_head", "n_inner", "n_positions", "plain_layers", "loop_layers", "injection", "mean_recurrence",
    "norm_eps", "rope_theta",
)  # fmt: skip
INJECTIONS = ("none", "gate")


def _counts(config: Config, key: str, least: int) -> list[int]:
    """Layers of each stretch. Raises UserError unless it is a list of whole numbers."""
    value = config[key]
    if not isinstance(value, list) or not value or not all(type(n) is int and n >= least for n in value):
        raise UserError(f"config.json: {key} is {value!r}: it must be a list of whole numbers of at least {least}")
    if sum(value) > MAX_LAYERS:
        raise UserError(f"config.json: {key} has {sum(value)} layers: more than {MAX_LAYERS} are refused; check the file")
    return value


class TwoScale(RecurrentModel):
    def __init__(self, config: Config):
        """
        Args:
            config: the parsed config.json. `plain_layers` has one entry more than `loop_layers`: they alternate.

        Raises:
            UserError: a key is missing or out of range.
        """
        super().__init__()
        need(config, FAMILY, REQUIRED_KEYS)
        refuse(config, FAMILY, "injection", *INJECTIONS)
        plain, looped = _counts(config, "plain_layers", 0), _counts(config, "loop_layers", 1)
        if len(plain) != len(looped) + 1:
            raise UserError(
                f"config.json: {len(looped)} looped groups have plain layers before, between and after them: "
                f"plain_layers needs {len(looped) + 1} entries, not {len(plain)}"
            )
        width, heads = whole(config, "n_embd"), whole(config, "n_head")
        if width % heads:
            raise UserError(f"config.json: {heads} heads do not share a width of {width} evenly")
        shape = Shape(width, heads, heads, width // heads, whole(config, "n_inner"), real(config, "norm_eps"), qk_bias=True)
        self.spec = ModelSpec(
            family=FAMILY,
            width=width,
            vocab_size=whole(config, "vocab_size"),
            max_length=whole(config, "n_positions"),
            mean_recurrence=whole(config, "mean_recurrence"),
            loops=tuple(LoopSpec(f"group {i + 1}", count, random_start=False) for i, count in enumerate(looped)),
            layers=sum(plain) + sum(looped),
            heads=heads,
            kv_heads=heads,
            head_width=width // heads,
        )
        embedding = nn.Embedding(self.spec.vocab_size, width)
        self.transformer = nn.ModuleDict(
            {
                "wte": embedding,
                "plain": nn.ModuleList(nn.ModuleList(PreNormBlock(shape) for _ in range(count)) for count in plain),
                "looped": nn.ModuleList(nn.ModuleList(PreNormBlock(shape) for _ in range(count)) for count in looped),
                "ln_f": RMSNorm(width, shape.eps),
            }
        )
        self.gates = (
            nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in looped) if config["injection"] == "gate" else None
        )
        self.lm_head = nn.Linear(width, self.spec.vocab_size, bias=False)
        if config.get("tie_embeddings", True):
            self.lm_head.weight = embedding.weight
        self.embed_scale = width**0.5
        self.angles = Rotary(shape.head_width, real(config, "rope_theta"), None)
        self.block_cost = block_flops(width, heads, heads, shape.head_width, shape.hidden)
        self.first_plain = [sum(plain[:i]) + sum(looped[:i]) for i in range(len(plain))]
        self.first_looped = [first + count for first, count in zip(self.first_plain, plain, strict=True)]

    def _run(self, kind: str, index: int, first: int, x: Tensor, context: AttentionContext) -> Tensor:
        rotary = self.angles.at(context.positions, self.lm_head.weight)
        for offset, block in enumerate(cast(nn.ModuleList, cast(nn.ModuleList, self.transformer[kind])[index])):
            x = block(x, rotary, first + offset, context)
        return x

    def embed(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        return self._run("plain", 0, self.first_plain[0], self.transformer["wte"](tokens) * self.embed_scale, context)

    def begin(self, loop: int, x: Tensor, noise: Tensor | None) -> Tensor:
        return x

    def step(self, loop: int, state: Tensor, x: Tensor, context: AttentionContext) -> Tensor:
        if self.gates is not None:
            state = torch.lerp(state, x, torch.sigmoid(self.gates[loop]))
        return self._run("looped", loop, self.first_looped[loop], state, context)

    def end(self, loop: int, state: Tensor, context: AttentionContext) -> Tensor:
        """The plain layers after a group; those after the last one belong to the readout."""
        if loop + 1 == len(self.spec.loops):
            return state
        return self._run("plain", loop + 1, self.first_plain[loop + 1], state, context)

    def readout(self, x: Tensor, context: AttentionContext) -> Tensor:
        return self.lm_head(self.transformer["ln_f"](self._run("plain", -1, self.first_plain[-1], x, context)))

    def keys_values(self, loop: int, state: Tensor, context: AttentionContext) -> dict[int, tuple[Tensor, Tensor]]:
        if self.gates is not None:  # a layer's input is a mixture with x, which the exit state alone does not give
            return super().keys_values(loop, state, context)
        rotary = self.angles.at(context.positions, self.lm_head.weight)
        blocks = cast(nn.ModuleList, cast(nn.ModuleList, self.transformer["looped"])[loop])
        return {
            layer: cast(Attention, block.attn).project(cast(nn.Module, block.norm_1)(state), rotary)[1:]
            for layer, block in enumerate(blocks, self.first_looped[loop])
        }

    def costs(self) -> dict[str, Flops]:
        block = self.block_cost
        looped = [loop.layers for loop in self.spec.loops]
        tail = self.spec.layers - self.first_plain[-1]
        before = self.spec.layers - sum(looped) - tail
        costs = {"embed": Flops(block.fixed * before, block.per_context * before)}
        costs |= {f"step/{i}": Flops(block.fixed * count, block.per_context * count) for i, count in enumerate(looped)}
        head = 2 * self.spec.width * self.spec.vocab_size
        return costs | {"readout": Flops(block.fixed * tail + head, block.per_context * tail)}
