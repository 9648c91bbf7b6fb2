"""ALBERT (Lan et al., arXiv 1909.11942): an encoder that applies one group of layers again and again.

Every iteration is a hidden state; the masked-language-model head reads any of them.
Shapes: `*` row dimensions, D width.
"""

from typing import Any

from torch import Tensor

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import Flops, LoopSpec, ModelSpec
from halting_bench.architectures.config import Config, layer_count, refuse
from halting_bench.architectures.transformers_backed import TransformersModel, linear_flops


class Albert(TransformersModel):
    library_class = "AlbertForMaskedLM"
    unused = ("albert.pooler.", "sop_classifier.")

    def __init__(self, inner: Any):
        """Args: inner: the library's model."""
        super().__init__()
        self.inner = inner
        config = inner.config
        self.group = inner.albert.encoder.albert_layer_groups[0].albert_layers
        self.spec = ModelSpec(
            family="albert",
            width=config.hidden_size,
            vocab_size=config.vocab_size,
            max_length=config.max_position_embeddings,
            mean_recurrence=config.num_hidden_layers,
            loops=(LoopSpec("group", len(self.group), random_start=False),),
            layers=len(self.group),
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            head_width=config.hidden_size // config.num_attention_heads,
            causal=False,
        )

    @classmethod
    def check(cls, config: Config) -> None:
        layer_count(config, "num_hidden_layers")
        refuse(config, "albert", "num_hidden_groups", 1)

    def embed(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        table = self.inner.albert.embeddings
        x = table.word_embeddings(tokens) + table.token_type_embeddings.weight[0] + table.position_embeddings(context.positions)
        return self.inner.albert.encoder.embedding_hidden_mapping_in(table.LayerNorm(x))

    def begin(self, loop: int, x: Tensor, noise: Tensor | None) -> Tensor:
        return x

    def step(self, loop: int, state: Tensor, x: Tensor, context: AttentionContext) -> Tensor:
        for number, layer in enumerate(self.group):
            state = self.run(layer, state, context, number=number)
        return state

    def end(self, loop: int, state: Tensor, context: AttentionContext) -> Tensor:
        return state

    def readout(self, x: Tensor, context: AttentionContext) -> Tensor:
        return self.inner.predictions(x)

    def costs(self) -> dict[str, Flops]:
        mapping = self.inner.albert.encoder.embedding_hidden_mapping_in
        return {
            "embed": Flops(linear_flops([mapping])),
            "step/0": Flops(linear_flops([self.group]), 4.0 * self.spec.width * len(self.group)),
            "readout": Flops(linear_flops([self.inner.predictions])),
        }
