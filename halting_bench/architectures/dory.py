"""Dory (NVIDIA Nemotron-Labs): input layers, a looped section that adds the input back, output layers; unit-norm states.

Shapes: `*` row dimensions, D width.
"""

from typing import Any

from torch import Tensor

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import Flops, LoopSpec, ModelSpec
from halting_bench.architectures.config import Config, layer_count
from halting_bench.architectures.transformers_backed import TransformersModel, linear_flops, positions_of


class Dory(TransformersModel):
    """Sequences are limited to the sliding window, within which its layers see everything that full ones do."""

    library_class = "DoryForCausalLM"

    def __init__(self, inner: Any):
        """Args: inner: the library's model."""
        super().__init__()
        self.inner = inner
        config = inner.config
        self.first, self.last = config.n_input_layers, config.num_hidden_layers - config.n_output_layers
        window = config.sliding_window if "sliding_attention" in config.layer_types else config.max_position_embeddings
        self.spec = ModelSpec(
            family="dory",
            width=config.hidden_size,
            vocab_size=config.vocab_size,
            max_length=min(config.max_position_embeddings, window),
            mean_recurrence=config.n_recurrent_loops,
            loops=(LoopSpec("recurrent", self.last - self.first, random_start=False),),
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_dim,
        )

    @classmethod
    def check(cls, config: Config) -> None:
        layer_count(config, "num_hidden_layers")

    def _layers(self, start: int, stop: int, x: Tensor, context: AttentionContext) -> Tensor:
        body = self.inner.model
        angles = {kind: body.rotary_emb(x, positions_of(context), kind) for kind in set(self.inner.config.layer_types)}
        for number in range(start, stop):
            layer = body.layers[number]
            x = self.run(layer, x, context, number=number, position_embeddings=angles[layer.attention_type])
        return x

    def embed(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        return self._layers(0, self.first, self.inner.model.embed_tokens(tokens), context)

    def begin(self, loop: int, x: Tensor, noise: Tensor | None) -> Tensor:
        return x

    def step(self, loop: int, state: Tensor, x: Tensor, context: AttentionContext) -> Tensor:
        norm = self.inner.model.norm
        return self._layers(self.first, self.last, norm(state) + norm(x), context)

    def end(self, loop: int, state: Tensor, context: AttentionContext) -> Tensor:
        return state

    def readout(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = self._layers(self.last, self.spec.layers, x, context)
        return self.inner.lm_head(self.inner.model.norm(x))

    def costs(self) -> dict[str, Flops]:
        layers = self.inner.model.layers
        attention = 4 * self.spec.heads * self.spec.head_width

        def part(start: int, stop: int, head: float = 0) -> Flops:
            return Flops(linear_flops(layers[start:stop]) + head, attention * (stop - start))

        return {
            "embed": part(0, self.first),
            "step/0": part(self.first, self.last),
            "readout": part(self.last, self.spec.layers, linear_flops([self.inner.lm_head])),
        }
