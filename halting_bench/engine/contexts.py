"""How rows of the engine attend over the static cache: packed positions (rounds) and one position a slot (decoding).

Shapes: N packed rows, R rows of different slots, C rows of a chunk, H query heads, G key/value heads, E head width,
S slots, P planes, T positions.
"""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from halting_bench.architectures.attention import AttentionContext
from halting_bench.engine.kv_cache import KvCache

CHUNK = 64
"""Queries of one sequence that share one attention call: small enough to skip most of the future, large enough to pay."""


class Chunk:
    """Some queries of every slot, padded to one rectangle, and the keys that they may see."""

    def __init__(self, slots: np.ndarray, rows: np.ndarray, owner: np.ndarray, rank: np.ndarray, positions: np.ndarray):
        """Args: slots: [B] ascending; rows: [C] packed rows; owner, rank: [C] each row's slot (index into slots) and place."""
        self.width = int(rank.max()) + 1
        self.count = len(slots)
        self.top = int(positions.max()) + 1
        self.rows, self.slots = rows, slots
        self.place = owner * self.width + rank
        self.positions = np.zeros(self.count * self.width, np.int64)
        self.positions[self.place] = positions
        self.contiguous = bool(slots[-1] - slots[0] + 1 == len(slots))


class PackedContext(AttentionContext):
    """Any positions of any slots, sorted by slot, then position. Row p attends to the cache's positions up to p."""

    def __init__(self, cache: KvCache, slots: np.ndarray, positions: np.ndarray, *, lengths: np.ndarray | None = None):
        """
        Args:
            cache: written at the rows' positions, then read.
            slots, positions: int64 [N].
            lengths: [S] of the sequences when the model is not causal: every row then sees its whole sequence.
        """
        self.cache, self.slots = cache, slots
        self.positions = torch.from_numpy(positions).to(cache.device)
        self.host_positions = positions
        self.lengths = lengths
        self.stage, self.plane = 0, 0
        self.live: Tensor | None = None

    def at(self, stage: int, step: int = 1) -> "PackedContext":
        """Itself, about to run a stage (EMBED, READOUT or a loop); step: that all rows are at."""
        self.stage, self.plane = stage, (step - 1) % self.cache.planes_of(stage)
        self.live = self._live(stage, step) if stage >= 0 and self.cache.mode.name == "absent" else None
        return self

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self.cache.layer(self.stage, layer)
        planes = kv.shape[2]
        flat = kv.view(2, -1, *self.cache.entry)
        write = self._write if planes == 1 else (self._slot * planes + self.plane) * self.cache.length + self.positions
        flat[0].index_copy_(0, write, k)
        flat[1].index_copy_(0, write, v)
        out = torch.empty_like(q)
        for chunk, rows, place, slots, mask in self._chunks:
            padded = q.new_zeros(chunk.count * chunk.width, *q.shape[1:])
            padded.index_copy_(0, place, q.index_select(0, rows))
            seen = kv[:, chunk.slots[0] : chunk.slots[-1] + 1] if chunk.contiguous else kv.index_select(1, slots)
            keys, values = seen[:, :, self.plane, : chunk.top].transpose(2, 3)
            if self.live is not None:
                mask = mask + self.live[slots, None, None, : chunk.top]
            mixed = F.scaled_dot_product_attention(
                padded.view(chunk.count, chunk.width, *q.shape[1:]).transpose(1, 2),
                keys,
                values,
                attn_mask=mask,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out.index_copy_(0, rows, mixed.transpose(1, 2).reshape(padded.shape).index_select(0, place))
        return out

    @cached_property
    def _slot(self) -> Tensor:
        return torch.from_numpy(self.slots).to(self.cache.device)

    @cached_property
    def _write(self) -> Tensor:
        return self._slot * self.cache.length + self.positions

    def _live(self, stage: int, step: int) -> Tensor:
        """[S, T], -inf at positions that exited before this step: in `absent` they are not there."""
        live = self.cache.depth[stage] >= step
        live[self._slot, self.positions] = True
        return self.cache.additive(live)

    @cached_property
    def _chunks(self) -> list[tuple[Chunk, Tensor, Tensor, Tensor, Tensor]]:
        slots, owner, counts = np.unique(self.slots, return_inverse=True, return_counts=True)
        rank = np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)
        parts = -(-int(counts.max()) // CHUNK)
        part = rank * parts // counts[owner]  # every sequence is cut into equal parts, so that rectangles are full
        start = -(-part * counts[owner] // parts)  # the first rank of the row's part
        built = []
        for number in range(parts):
            rows = np.flatnonzero(part == number)
            if len(rows) == 0:
                continue
            present, own = np.unique(owner[rows], return_inverse=True)
            chunk = Chunk(slots[present], rows, own, rank[rows] - start[rows], self.host_positions[rows])
            index = self._index
            built.append((chunk, index(rows), index(chunk.place), index(chunk.slots), self._mask(chunk)))
        return built

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.cache.device)

    def _mask(self, chunk: Chunk) -> Tensor:
        """[B, 1, width or 1, top], 0 where a query may look and -inf elsewhere. Padding looks at position 0."""
        if self.lengths is not None:
            chunk.top = int(self.lengths[chunk.slots].max())
            last = self._index(self.lengths[chunk.slots] - 1)[:, None]
        else:
            last = self._index(chunk.positions).view(chunk.count, chunk.width)
        return self.cache.additive(self.cache.up_to(last, chunk.top))[:, None]


class SlotContext(AttentionContext):
    """One position of each of R slots, at steps of their own. Row r attends to its slot's positions up to its own."""

    def __init__(
        self,
        cache: KvCache,
        slots: Tensor,
        positions: Tensor,
        top: int,
        *,
        single: tuple[int, int] | None = None,
        fixed: bool = False,
    ):
        """
        Args:
            cache: written at the rows' positions, then read.
            slots, positions: int64 [R].
            top: how many positions are read, at least the largest position + 1.
            single: slot and position of the only row, on the host: it then reads its pages in place instead of gathering.
            fixed: do the same operations whatever the cache holds, so that they can be recorded.
        """
        self.cache, self.slots, self.positions, self.top = cache, slots, positions, top
        self.masked = fixed or cache.any_hidden
        self.single = None if self.masked or cache.mode.name == "absent" else single
        self.stage = 0
        self.steps: Tensor = positions

    def at(self, stage: int, steps: Tensor | None = None, single_step: int = 1) -> "SlotContext":
        """Itself, about to run a stage.

        Args:
            stage: EMBED, READOUT or a loop.
            steps: int64 [R], the step that each row is at (1-based); needed for a loop.
            single_step: the only row's step, on the host.
        """
        self.stage = stage
        planes = self.cache.planes_of(stage)
        if steps is not None:
            self.steps = steps
        if self.single is not None:
            self.plane = (single_step - 1) % planes
            return self
        page = self.slots if planes == 1 else self.slots * planes + (self.steps - 1) % planes
        self.write = page * self.cache.length + self.positions
        self.pages = self.cache.page_rows(stage, page)
        if stage >= 0 and self.cache.mode.name == "absent":
            deep = self.cache.depth[stage][self.slots, : self.top] >= self.steps[:, None]
            deep = deep.scatter(1, self.positions[:, None], True)  # the row itself is there
            self.mask = self.cache.additive(self._seen & deep)[:, None, None]
        else:
            self.mask = self._causal
        return self

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        if self.single is not None:
            slot, position = self.single
            keys, values = self.cache.page(self.stage, layer, slot, self.plane)
            keys.select(2, position).copy_(k)
            values.select(2, position).copy_(v)
            keys, values = keys.narrow(2, 0, self.top), values.narrow(2, 0, self.top)
            return F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=grouped).squeeze(2)
        kv = self.cache.layer(self.stage, layer)
        flat = kv.view(2, -1, *self.cache.entry)
        flat[0].index_copy_(0, self.write, k)
        flat[1].index_copy_(0, self.write, v)
        keys, values = self.cache.pages(self.stage, layer, self.pages, self.top).transpose(2, 3)
        mixed = F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, attn_mask=self.mask, enable_gqa=grouped)
        return mixed.squeeze(2)

    @cached_property
    def _seen(self) -> Tensor:
        seen = self.cache.up_to(self.positions, self.top)
        return seen & ~self.cache.hidden[self.slots, : self.top] if self.masked else seen

    @cached_property
    def _causal(self) -> Tensor:
        return self.cache.additive(self._seen)[:, None, None]
