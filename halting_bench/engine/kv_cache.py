"""Static K/V storage, and what a later token sees there of a token that exited early (`kv_mode`).

A core layer keeps one *plane* per recurrence step (or fewer, by mode); step k of every row reads plane (k - 1) % planes.
When a token exits at n, the planes it never reached are filled once, so that no reader ever asks how deep it went.

Shapes: S slots (sequences), P planes, T positions, G key/value heads, E head width, r rows.
"""

import re
from dataclasses import dataclass

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
        self._layers: dict[tuple[int, int], Tensor] = {}
        self.depth = [torch.zeros(slots, length, dtype=torch.int64, device=like.device) for _ in spec.loops]
        self.hidden = torch.zeros(slots, length, dtype=torch.bool, device=like.device)
        self.any_hidden = False

    def layer(self, stage: int, layer: int) -> Tensor:
        """[2, S, P, T, G, E]: keys and values. stage: EMBED, READOUT or a loop."""
        found = self._layers.get((stage, layer))
        if found is None:
            shape = (2, self.slots, self.planes_of(stage), self.length, *self.entry)
            found = self._layers[stage, layer] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return found

    def planes_of(self, stage: int) -> int:
        return self.planes if stage >= 0 else 1

    @property
    def bytes(self) -> int:
        """Bytes of K/V held."""
        return sum(kv.nbytes for kv in self._layers.values())

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
        for (stage, layer), kv in self._layers.items():
            if stage == loop:
                flat = kv.view(2, -1, *self.entry)
                filling = torch.stack(exit_kv[layer])[:, self._index(row)] if exit_kv else flat.index_select(1, source)
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
