"""SELF-Transformer ("Change of Thought", arXiv 2507.13569): an encoder whose self-attention iterates to a fixed point.

Every layer is a loop. With u the attention's output, the paper iterates u <- (1 - a) u + a * softmax(Q K^T) V W_O, where Q and
K read u and V stays that of the layer's input x. Here the state is s = x + u, so that s_0 = x and

    s_k = (1 - a) s_{k-1} + a * (x + attention(Q, K from norm(s_{k-1}), V from norm(x))).

At a = 1 and one step this is an ordinary pre-norm encoder layer, evaluated once. The normalisation, and the input inside Q and
K, are ours: without them the iteration learned for a fixed number of steps does not settle. After the loop comes the MLP.
Shapes: `*` row dimensions, D width.
"""

from typing import cast

from torch import Tensor, nn

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import Flops, LoopSpec, ModelSpec, RecurrentModel
from halting_bench.architectures.config import Config, layer_count, need, real, whole
from halting_bench.architectures.huginn import GatedMLP
from halting_bench.architectures.layers import RMSNorm, Rotary, rotate_halves
from halting_bench.errors import UserError

FAMILY = "self_transformer"
REQUIRED_KEYS = (
    "vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "max_position_embeddings",
    "mean_recurrence", "damping", "norm_eps", "rope_theta",
)  # fmt: skip


class FixedPointLayer(nn.Module):
    """One encoder layer: attention iterated on s with V frozen, then s + mlp(norm(s))."""

    def __init__(self, width: int, heads: int, hidden: int, eps: float, damping: float):
        super().__init__()
        self.heads, self.damping = heads, damping
        self.norm_state, self.norm_input, self.norm_mlp = (RMSNorm(width, eps) for _ in range(3))
        self.query_key = nn.Linear(width, 2 * width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.mlp = GatedMLP(width, hidden)

    def step(self, state: Tensor, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, context: AttentionContext) -> Tensor:
        """s_{k-1}, x: [*, D] -> s_k [*, D]."""
        q, k = (part.unflatten(-1, (self.heads, -1)) for part in self.query_key(self.norm_state(state)).chunk(2, dim=-1))
        v = self.value(self.norm_input(x)).unflatten(-1, (self.heads, -1))
        mixed = context.attend(layer, rotate_halves(q, *rotary), rotate_halves(k, *rotary), v)
        return state.lerp(x + self.proj(mixed.flatten(-2)), self.damping)

    def end(self, state: Tensor) -> Tensor:
        return state + self.mlp(self.norm_mlp(state))


class SelfTransformer(RecurrentModel):
    def __init__(self, config: Config):
        """
        Args:
            config: the parsed config.json. `damping` is a, in (0, 1]. With `token_base` b, token t stands for the pair
                (t // b, t % b) of the same b things: its embedding is that of the first plus a projection of the second's.

        Raises:
            UserError: a key is missing or out of range.
        """
        super().__init__()
        need(config, FAMILY, REQUIRED_KEYS)
        width, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
        layers, eps, damping = layer_count(config, "num_hidden_layers"), real(config, "norm_eps"), real(config, "damping")
        if damping > 1:
            raise UserError(f"config.json: damping is {damping}: it must be above 0 and at most 1")
        if width % heads:
            raise UserError(f"config.json: {heads} heads do not share a width of {width} evenly")
        self.hidden = whole(config, "intermediate_size")
        self.spec = ModelSpec(
            family=FAMILY,
            width=width,
            vocab_size=whole(config, "vocab_size"),
            max_length=whole(config, "max_position_embeddings"),
            mean_recurrence=whole(config, "mean_recurrence"),
            loops=tuple(LoopSpec(f"layer {i + 1}", 1, random_start=False) for i in range(layers)),
            layers=layers,
            heads=heads,
            kv_heads=heads,
            head_width=width // heads,
            causal=False,
        )
        self.token_base = whole(config, "token_base") if config.get("token_base") is not None else None
        tied = bool(config.get("tie_embeddings", True))
        if self.token_base is not None and tied:
            raise UserError("config.json: token_base leaves no single embedding to tie: set tie_embeddings to false")
        rows = self.token_base or self.spec.vocab_size
        if self.token_base is not None and self.spec.vocab_size > rows**2:
            raise UserError(f"config.json: {rows} things make {rows**2} pairs, but vocab_size is {self.spec.vocab_size}")
        embedding = nn.Embedding(rows, width)
        self.encoder = nn.ModuleDict(
            {
                "wte": embedding,
                "layers": nn.ModuleList(FixedPointLayer(width, heads, self.hidden, eps, damping) for _ in range(layers)),
                "ln_f": RMSNorm(width, eps),
            }
        )
        self.lm_head = nn.Linear(width, self.spec.vocab_size, bias=False)
        if tied:
            self.lm_head.weight = embedding.weight
        if self.token_base is not None:
            self.encoder["second"] = nn.Linear(width, width, bias=False)
        self.embed_scale = width**0.5
        self.angles = Rotary(self.spec.head_width, real(config, "rope_theta"), None)

    def _layer(self, loop: int) -> FixedPointLayer:
        return cast(FixedPointLayer, cast(nn.ModuleList, self.encoder["layers"])[loop])

    def embed(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        if self.token_base is None:
            return self.encoder["wte"](tokens) * self.embed_scale
        first, second = (self.encoder["wte"](part) for part in (tokens // self.token_base, tokens % self.token_base))
        return (first + self.encoder["second"](second)) * self.embed_scale

    def begin(self, loop: int, x: Tensor, noise: Tensor | None) -> Tensor:
        return x

    def step(self, loop: int, state: Tensor, x: Tensor, context: AttentionContext) -> Tensor:
        rotary = self.angles.at(context.positions, self.lm_head.weight)
        return self._layer(loop).step(state, x, rotary, loop, context)

    def end(self, loop: int, state: Tensor, context: AttentionContext) -> Tensor:
        return self._layer(loop).end(state)

    def readout(self, x: Tensor, context: AttentionContext) -> Tensor:
        return self.lm_head(self.encoder["ln_f"](x))

    def costs(self) -> dict[str, Flops]:
        """V of the layer's input is counted at every step, where it is computed."""
        width, loops = self.spec.width, len(self.spec.loops)
        mlp = 6 * width * self.hidden
        pairs = 0 if self.token_base is None else 2 * width * width
        costs = {"embed": Flops(mlp * (loops - 1) + pairs)}
        costs |= {f"step/{i}": Flops(8 * width * width, 4 * width) for i in range(loops)}
        return costs | {"readout": Flops(mlp + 2 * width * self.spec.vocab_size)}
