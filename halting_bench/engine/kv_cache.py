"""Static K/V storage, and what a later token sees there of a token that exited early (`kv_mode`).

A core layer keeps one *plane* per recurrence step (or fewer, by mode); step k of every row reads plane (k - 1) % planes.
When a token exits at n, the planes it never reached are filled once, so that no reader ever asks how deep it went.

Shapes: S slots (sequences), P planes, T positions, G key/value heads, E head width, r rows.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from halting_bench.architectures.base import ModelSpec
from halting_bench.errors import UserError, unknown_name

EMBED, READOUT = -1, -2
"""Stages without planes; a loop's stage is its index."""

EXECUTED_MODES = ("latest", "propagate", "last-only", "absent")
REFERENCE_MODES = ("full", "rerun")

KeysValues = dict[int, tuple[Tensor, Tensor]]
"""Layer -> its keys and values of some rows, [r, G, E] each."""


@dataclass(frozen=True)
class KvMode:
    """What core layers show of a token that exited at n to a later token at step k > n.

    latest: step n's; propagate: projections of the exit state; last-only: one plane, so the deepest step's at every k;
    modulo-m: a ring of m planes; absent: nothing. `full` and `rerun` are reference modes (masked_reference.py).
    """

    name: str
    ring: int = 0  # m of modulo-m

    @classmethod
    def parse(cls, text: str) -> "KvMode":
        """Raises UserError unless `text` is a known mode."""
        if match := re.fullmatch(r"modulo-([1-9]\d*)", text):
            return cls("modulo", int(match[1]))
        if text not in EXECUTED_MODES + REFERENCE_MODES:
            raise unknown_name("kv_mode", text, (*EXECUTED_MODES, *REFERENCE_MODES, "modulo-<m>"))
        return cls(text)

    def executable(self) -> "KvMode":
        """Itself. Raises UserError for a reference mode, which saves no work."""
        if self.name in REFERENCE_MODES:
            known = ", ".join(EXECUTED_MODES)
            raise UserError(f"kv_mode '{self.name}' saves no work and is never executed: type one of {known}, modulo-<m>")
        return self

    def planes(self, max_steps: int) -> int:
        """How many steps of a token's K/V are kept."""
        return {"last-only": 1, "modulo": min(self.ring, max_steps)}.get(self.name, max_steps)

    def exact_by_rounds(self, max_steps: int) -> bool:
        """Whether all positions of a text may run step k together: no plane is overwritten by a deeper step."""
        return self.planes(max_steps) == max_steps


class KvCache:
    """K/V of all layers. A layer's storage, [2, S, P, T, G, E], is allocated whole when the layer first runs."""

    def __init__(self, spec: ModelSpec, slots: int, length: int, planes: int, mode: KvMode, like: Tensor):
        """
        Args:
            spec: of the model.
            slots: S.
            length: T.
            planes: P of core layers; other layers have one.
            mode: decides what `freeze` does.
            like: gives dtype and device.
        """
        self.slots, self.length, self.planes, self.mode = slots, length, planes, mode
        self.entry = (spec.kv_heads, spec.head_width)
        self.dtype, self.device = like.dtype, like.device
        self.shape = (slots, length, planes, mode, like.dtype, like.device)
        self._held: list[Tensor] = []
        self._loops: dict[int, Tensor] = {}  # loop -> its layers in one block: a row is frozen in all of them at once
        self._layers: dict[tuple[int, int], Tensor] = {}
        self._pages: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}
        self._counts = [loop.layers for loop in spec.loops]
        self.depth = [torch.zeros(slots, length, dtype=torch.int64, device=like.device) for _ in spec.loops]
        self.hidden = torch.zeros(slots, length, dtype=torch.bool, device=like.device)
        self.any_hidden = False
        self._zero, self._never = (torch.tensor(value, dtype=like.dtype, device=like.device) for value in (0.0, -torch.inf))
        self._places = torch.arange(length, device=like.device)
        self._workspace = torch.empty(0, dtype=like.dtype, device=like.device)

    def layer(self, stage: int, layer: int) -> Tensor:
        """[2, S, P, T, G, E]: keys and values. stage: EMBED, READOUT or a loop."""
        found = self._layers.get((stage, layer))
        if found is None:
            if stage < 0:
                found = self._allocate(1, stage)[0]
            else:
                if stage not in self._loops:
                    self._loops[stage] = self._allocate(self._counts[stage], stage)
                found = self._loops[stage][sum(key[0] == stage for key in self._layers)]
            self._layers[stage, layer] = found
        return found

    def _allocate(self, layers: int, stage: int) -> Tensor:
        """[layers, 2, S, P, T, G, E]."""
        shape = (layers, 2, self.slots, self.planes_of(stage), self.length, *self.entry)
        self._held.append(torch.zeros(shape, dtype=self.dtype, device=self.device))
        return self._held[-1]

    def page(self, stage: int, layer: int, slot: int, plane: int) -> tuple[Tensor, Tensor]:
        """One page in place: keys and values, [1, G, T, E] each."""
        found = self._pages.get((stage, layer, slot, plane))
        if found is None:
            keys, values = self.layer(stage, layer)[:, slot, plane].transpose(1, 2).unsqueeze(1)
            found = self._pages[stage, layer, slot, plane] = keys, values
        return found

    def pages(self, stage: int, layer: int, rows: Tensor, top: int) -> Tensor:
        """Gathers pages, [2, R, top, G, E], into memory that the next call reuses.

        Args:
            stage, layer: as in `layer`.
            rows: int64 [2 R], where keys, then values, of each page stand (`page_rows`).
            top: positions to read.
        """
        size = len(rows) * top * self.entry[0] * self.entry[1]
        if len(self._workspace) < size:  # a fresh allocation a layer would spend its time in page faults
            self._workspace = self._workspace.new_empty(len(rows) * self.length * self.entry[0] * self.entry[1])
        out = self._workspace[:size].view(-1, top, *self.entry)
        torch.index_select(self.layer(stage, layer).flatten(0, 2)[:, :top], 0, rows, out=out)
        return out.view(2, -1, top, *self.entry)

    def up_to(self, positions: Tensor, top: int) -> Tensor:
        """Bool [*positions, top]: the places that each position may look at."""
        return self._places[:top] <= positions.unsqueeze(-1)

    def additive(self, seen: Tensor) -> Tensor:
        """A bool mask as what is added to attention scores."""
        return torch.where(seen, self._zero, self._never)

    def page_rows(self, stage: int, page: Tensor) -> Tensor:
        """page: int64 [R], slot * planes + plane. Returns [2 R]."""
        return torch.cat((page, page + self.slots * self.planes_of(stage)))

    def planes_of(self, stage: int) -> int:
        return self.planes if stage >= 0 else 1

    @property
    def bytes(self) -> int:
        """Bytes of K/V held."""
        return sum(block.nbytes for block in self._held)

    def freeze(self, loop: int, slots: np.ndarray, positions: np.ndarray, steps: np.ndarray, exit_kv: KeysValues) -> None:
        """Rows exit a loop: fills the planes they did not reach.

        Args:
            loop: the loop.
            slots, positions, steps: int64 [r] of the rows; steps is n.
            exit_kv: for `propagate`, each layer's projections of the exit states; else empty.
        """
        if self.mode.name == "absent":
            where = self._index(slots), self._index(positions)
            self.depth[loop][where] = self._index(steps)
            return
        first = np.zeros_like(steps) if self.planes == 1 and exit_kv else steps
        counts = np.maximum(self.planes - first, 0)
        if not counts.any():
            return
        row = np.repeat(np.arange(len(steps)), counts)
        plane = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts) + first[row]
        target = self._index((slots[row] * self.planes + plane) * self.length + positions[row])
        source = self._index((slots[row] * self.planes + steps[row] - 1) * self.length + positions[row])
        flat = self._loops[loop].flatten(2, 4).flatten(0, 1)  # [2 layers, S P T, G, E]
        if exit_kv:
            order = [layer for stage, layer in self._layers if stage == loop]
            filling = torch.stack([part for layer in order for part in exit_kv[layer]])[:, self._index(row)]
        else:
            filling = flat.index_select(1, source)
        flat.index_copy_(1, target, filling)

    def hide(self, slot: int, position: int) -> None:
        """Makes a position unattendable for good (its state broke), and leaves nothing non-finite behind."""
        for kv in self._layers.values():
            kv[:, slot, :, position] = 0
        self.hidden[slot, position] = True
        self.any_hidden = True

    def clear(self, slot: int) -> None:
        """Leaves nothing non-finite behind in a slot: a masked NaN still spoils a sum."""
        for kv in self._layers.values():
            kv[:, slot] = 0

    def release(self, slot: int) -> None:
        """Forgets what was hidden in a slot, before another sequence takes it."""
        if self.any_hidden:
            self.hidden[slot] = False
            self.any_hidden = bool(self.hidden.any())

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)


@dataclass
class Workspace:
    """What the runs of one model at one shape may share, one after the other: K/V memory and what was recorded over it."""

    cache: KvCache | None = None
    recorded: dict[tuple[int, int, int], Callable[..., Tensor]] = field(default_factory=dict)

    def take(self, spec: ModelSpec, slots: int, length: int, planes: int, mode: KvMode, like: Tensor) -> KvCache:
        """The last run's cache where it has this shape, else a new one."""
        if self.cache is None or self.cache.shape != (slots, length, planes, mode, like.dtype, like.device):
            self.recorded.clear()
            self.cache = None  # before the next one is allocated
            self.cache = KvCache(spec, slots, length, planes, mode, like)
        for slot in range(slots):
            self.cache.release(slot)
        return self.cache
