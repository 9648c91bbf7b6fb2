"""Nanbeige 4.2: a Llama stack run twice with the same weights, the final norm after each loop.

Shapes: `*` row dimensions, D width.
"""

from torch import Tensor, nn

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.config import Config, real, refuse, whole
from halting_bench.architectures.layers import GroupedAttention, RMSNorm, SwiGLU
from halting_bench.architectures.stack import LoopedStack, checked

UNSUPPORTED = (
    "qk_layernorm", "emb_neighbor_num", "insert_ngram_layer_idx", "ngram_insert_all_layers", "enable_double_loop_split",
    "loop_middle_layers", "loop_share_kv", "enable_hyper_connection", "enable_mhc", "enable_h_res_identity",
    "enable_depth_attention",
)  # fmt: skip
"""Switches of the public config class that no released checkpoint turns on; each would change what is computed."""


class NanbeigeLayer(nn.Module):
    """x <- x + attn(norm(x)); x <- x + mlp(norm(x))."""

    def __init__(self, config: Config):
        super().__init__()
        width, heads, eps = whole(config, "hidden_size"), whole(config, "num_attention_heads"), real(config, "rms_norm_eps")
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width, eps), RMSNorm(width, eps)
        head_width = whole(config, "head_dim", width // heads)
        kv_heads = whole(config, "num_key_value_heads", heads)
        self.self_attn = GroupedAttention(width, heads, kv_heads, head_width, biased=bool(config.get("attention_bias", False)))
        self.mlp = SwiGLU(width, whole(config, "intermediate_size"), biased=bool(config.get("mlp_bias", False)))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, context: AttentionContext) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, layer, context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Nanbeige(LoopedStack):
    def __init__(self, config: Config):
        """Args: config: the parsed public config.json. Raises UserError when a key is missing or out of range."""
        checked(config, "nanbeige", "num_loops")
        for switch in UNSUPPORTED:
            refuse(config, "nanbeige", switch, False, None, 0, [])
        super().__init__(config, family="nanbeige", loops_key="num_loops", layer=lambda: NanbeigeLayer(config))
        self.norm_between_loops = not config.get("skip_loop_final_norm", False)

    def step(self, loop: int, state: Tensor, x: Tensor, context: AttentionContext) -> Tensor:
        state = self.layers(state, context)
        return self.model["norm"](state) if self.norm_between_loops else state

    def end(self, loop: int, state: Tensor, context: AttentionContext) -> Tensor:
        return state if self.norm_between_loops else self.model["norm"](state)
