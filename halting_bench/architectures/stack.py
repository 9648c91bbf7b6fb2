"""Models whose loop is the whole stack of layers: no prelude, no coda, no injection.

Shapes: `*` row dimensions, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import Flops, LoopSpec, ModelSpec, RecurrentModel
from halting_bench.architectures.config import Config, layer_count, need, real, refuse, whole
from halting_bench.architectures.layers import GroupedAttention, RMSNorm, Rotary, block_flops
from halting_bench.errors import UserError

REQUIRED_KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "rms_norm_eps",
)  # fmt: skip


class LoopedStack(RecurrentModel):
    """Embedding -> (all layers, then possibly the final norm) x loops -> head.

    The key/value slot of a layer in step k is (k - 1) * layers + layer: each loop has its own.
    """

    def __init__(self, config: Config, *, family: str, loops_key: str, layer: Callable[[], nn.Module], has_gate: bool = False):
        """Args: loops_key: the config's key of the trained number of loops. layer: makes one layer."""
        super().__init__()
        width, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
        layers = layer_count(config, "num_hidden_layers")
        head_width = whole(config, "head_dim", width // heads)
        refuse(config, family, "hidden_act", "silu")
        refuse(config, family, "use_sliding_window", False)
        self.hidden = whole(config, "intermediate_size")
        self.spec = ModelSpec(
            family=family,
            width=width,
            vocab_size=whole(config, "vocab_size"),
            max_length=whole(config, "max_position_embeddings", 2048),
            mean_recurrence=whole(config, loops_key),
            loops=(LoopSpec("stack", layers, random_start=False),),
            layers=layers,
            heads=heads,
            kv_heads=whole(config, "num_key_value_heads", heads),
            head_width=head_width,
            fixed_recurrence=True,
            has_gate=has_gate,
        )
        if heads % self.spec.kv_heads:
            raise UserError(f"config.json: {heads} query heads do not share {self.spec.kv_heads} key/value heads evenly")
        embedding = nn.Embedding(self.spec.vocab_size, width)
        self.rotary = Rotary.from_config(config, head_width)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": embedding,
                "layers": nn.ModuleList(layer() for _ in range(layers)),
                "norm": RMSNorm(width, real(config, "rms_norm_eps")),
            }
        )
        self.lm_head = nn.Linear(width, self.spec.vocab_size, bias=False)
        if config.get("tie_word_embeddings", False):
            self.lm_head.weight = embedding.weight

    def embed(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        return self.model["embed_tokens"](tokens)

    def begin(self, loop: int, x: Tensor, noise: Tensor | None) -> Tensor:
        return x

    def layers(self, state: Tensor, context: AttentionContext) -> Tensor:
        """All layers once, without the final norm."""
        rotary = self.rotary.at(context.positions, self.lm_head.weight)
        for index, layer in enumerate(cast(nn.ModuleList, self.model["layers"])):
            state = layer(state, rotary, index, context)
        return state

    def keys_values(self, loop: int, state: Tensor, context: AttentionContext) -> dict[int, tuple[Tensor, Tensor]]:
        rotary = self.rotary.at(context.positions, self.lm_head.weight)
        found = {}
        for index, layer in enumerate(cast(nn.ModuleList, self.model["layers"])):
            normed = cast(RMSNorm, layer.input_layernorm)(state)
            found[index] = cast(GroupedAttention, layer.self_attn).keys_values(normed, rotary)
        return found

    def readout(self, x: Tensor, context: AttentionContext) -> Tensor:
        return self.lm_head(x)

    def costs(self) -> dict[str, Flops]:
        spec = self.spec
        block = block_flops(spec.width, spec.heads, spec.kv_heads, spec.head_width, self.hidden)
        return {
            "embed": Flops(0),
            "step/0": Flops(block.fixed * spec.layers, block.per_context * spec.layers),
            "readout": Flops(2 * spec.width * spec.vocab_size),
        }


def checked(config: Config, family: str, loops_key: str) -> Config:
    """The config itself, once every key that a looped stack needs is known to be there."""
    need(config, family, (*REQUIRED_KEYS, loops_key))
    return config
