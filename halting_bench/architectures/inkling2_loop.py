"""Inkling-2 (Thinking Machines): layers between two boundaries looped; a pass restarts and gets messages from the last one.

A pass needs the last one's hidden state and its block states (sums of layers, which attention residuals read), so all of
them are the state, side by side: hidden, blocks before the loop, blocks inside it. Short convolutions and relative
position biases mix positions outside attention, so rows run dense only: such a model is replayed, not executed.
Shapes: B, T a batch, D width of one hidden state, K block states.
"""

from typing import Any

import torch
from torch import Tensor

from halting_bench.architectures.attention import AttentionContext, DenseContext
from halting_bench.architectures.base import LoopSpec, ModelSpec
from halting_bench.architectures.config import Config, layer_count, refuse
from halting_bench.architectures.transformers_backed import TransformersModel
from halting_bench.errors import UserError


class Inkling2Loop(TransformersModel):
    """The text model; sequences are limited to the sliding window."""

    library_class = "Inkling2LoopForCausalLM"
    attention = "eager"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)  # its grouped expert products know no float64

    def __init__(self, inner: Any):
        """Args: inner: the library's model."""
        super().__init__()
        self.inner = inner
        self.body = inner.model.language_model if self.library_class.endswith("Generation") else inner.model
        config = self.text = self.body.config
        self.first, self.last = config.loop_layer_index_start, config.loop_layer_index_end
        size = config.n_layers_per_attn_res_block
        self.blocks_before = len(range(0, self.first, size))
        self.blocks_inside = len(range(self.first, self.last, size))
        self.spec = ModelSpec(
            family="inkling2_loop",
            width=(1 + self.blocks_before + self.blocks_inside) * config.hidden_size,
            vocab_size=config.unpadded_vocab_size,
            max_length=min(config.max_position_embeddings, config.sliding_window_size),
            mean_recurrence=config.loop_num_passes,
            loops=(LoopSpec("pass", self.last - self.first, random_start=False),),
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_dim,
            dense_only=True,
        )

    @classmethod
    def check(cls, config: Config) -> None:
        text = config.get("text_config", config)
        if not isinstance(text, dict):
            raise UserError(f"config.json: text_config is {text!r}: it must be an object")
        layer_count(text, "num_hidden_layers")
        refuse(text, "inkling2_loop", "attention_dropout", 0, 0.0)

    def _layers(
        self, start: int, stop: int, hidden: Tensor, blocks: Tensor, context: AttentionContext, last: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Layers start..stop. hidden: [B, T, D]; blocks: [B, T, K, D]; last: hidden and blocks of the last pass."""
        if not isinstance(context, DenseContext):
            raise UserError("inkling2_loop mixes positions outside attention: only dense batches run; use replayed evidence")
        positions = context.positions[None]
        distance = positions[0][:, None] - positions[0][None, :]
        mask = hidden.new_zeros(distance.shape).masked_fill(distance < 0, torch.finfo(hidden.dtype).min)[None, None]
        for number in range(start, stop):
            layer = self.body.layers[number]
            extra = {}
            if last is not None:
                extra["messages"] = self.body.message_input(last[..., 1:, :], last[..., 0, :], number - start)
            after = layer(
                hidden, blocks, attention_mask=mask, relative_distance=distance, conv_mask=None, position_ids=positions, **extra
            )
            if layer.is_block_boundary:
                blocks = torch.cat((blocks, hidden.unsqueeze(-2)), dim=-2)
            hidden = after
        return hidden, blocks

    def _split(self, state: Tensor) -> Tensor:
        return state.view(*state.shape[:-1], -1, self.text.hidden_size)

    def embed(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """[B, T, (1 + blocks before) D]: the hidden state and the block states before the loop."""
        hidden = self.body.embed_tokens(tokens)
        hidden, blocks = self._layers(0, self.first, hidden, hidden.new_zeros(*hidden.shape[:-1], 0, hidden.shape[-1]), context)
        return torch.cat((hidden.unsqueeze(-2), blocks), dim=-2).flatten(-2)

    def begin(self, loop: int, x: Tensor, noise: Tensor | None) -> Tensor:
        """Zeros, except for the blocks before the loop: a hidden state of zeros marks that there was no pass yet."""
        parts = self._split(x)
        nothing = torch.zeros_like(parts[..., :1, :])
        inside = nothing.expand(*nothing.shape[:-2], self.blocks_inside, -1)
        return torch.cat((nothing, parts[..., 1:, :], inside), dim=-2).flatten(-2)

    def step(self, loop: int, state: Tensor, x: Tensor, context: AttentionContext) -> Tensor:
        start, previous = self._split(x), self._split(state)
        # The first block inside the loop is the input of the loop itself: no message comes from it.
        last = torch.cat((previous[..., :1, :], previous[..., 2 + self.blocks_before :, :]), dim=-2)
        first_pass = not bool(previous[..., 0, :].any())  # a dense batch is in step, so one look serves all rows
        hidden, blocks = self._layers(
            self.first, self.last, start[..., 0, :], start[..., 1:, :], context, None if first_pass else last
        )
        return torch.cat((hidden.unsqueeze(-2), blocks), dim=-2).flatten(-2)

    def end(self, loop: int, state: Tensor, context: AttentionContext) -> Tensor:
        return state

    def readout(self, x: Tensor, context: AttentionContext) -> Tensor:
        parts = self._split(x)
        hidden, blocks = self._layers(self.last, self.text.num_hidden_layers, parts[..., 0, :], parts[..., 1:, :], context)
        hidden = self.body.norm(self.body.final_input(blocks, hidden)[0]).to(x.dtype)
        logits = self.inner.lm_head(hidden).float()
        cap = self.text.final_logit_softcapping
        return torch.tanh(logits / cap) * cap


class Inkling2LoopMultimodal(Inkling2Loop):
    """The released checkpoint, whose image tower is loaded and never called."""

    library_class = "Inkling2LoopForConditionalGeneration"
