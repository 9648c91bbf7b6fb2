"""Masked bytes of text, for encoders: runs of one to eight bytes are hidden, and predicted from what stands on both sides.

A document is cut into windows of about equal length, none longer than `window`. In a hidden run every byte's input is `MASK`;
only these bytes are scored. Which are hidden follows from the document's bytes and the window's number alone. The longer the
run, the less its bytes are told by their neighbours: its length is the difficulty.

Shapes: T positions of a window.
"""

import hashlib

import numpy as np

from halting_bench.benchmarks.base import NOT_SCORED, Direction, Sample, Sequence
from halting_bench.benchmarks.classes import CLASS_NAMES, class_codes
from halting_bench.benchmarks.text import BYTES, DocumentBenchmark, Encoding
from halting_bench.errors import UserError

MASK = 0xFF
"""Occurs nowhere in UTF-8, as NUL does not in text: a vocabulary of bytes needs no further token."""

MASK_VERSION = 1
WINDOW, SHORTEST_WINDOW = 128, 64
RUN_BOUNDS = (1, 2, 4, 8)  # longest run of each bin
RUN_NAMES = ("1", "2", "3-4", "5-8")
GAP = (3, 11)
"""Fewest and most bytes left visible before a run; with these about one byte in five is hidden."""
SURELY_HIDING = GAP[1] + RUN_BOUNDS[-1] + GAP[0]
"""In a window of so many bytes some are hidden, whatever is drawn."""

_STREAM = 0x6D61  # keeps these draws apart from other seeded ones
_LENGTHS = np.arange(1, RUN_BOUNDS[-1] + 1)
_BINS = np.searchsorted(RUN_BOUNDS, _LENGTHS)
_CHANCE = 1.0 / (np.bincount(_BINS)[_BINS] * _LENGTHS)  # each bin hides about as many bytes
_CHANCE /= _CHANCE.sum()


def hidden_runs(length: int, rng: np.random.Generator) -> np.ndarray:
    """Draws what is hidden of a window: int16 [T], the bin of the run that a position is in (index into RUN_NAMES), or -1."""
    bins = np.full(length, -1, np.int16)
    place = int(rng.integers(GAP[0], GAP[1] + 1))
    while True:
        run = int(rng.choice(_LENGTHS, p=_CHANCE))
        if place + run + GAP[0] > length:
            return bins
        bins[place : place + run] = _BINS[run - 1]
        place += run + int(rng.integers(GAP[0], GAP[1] + 1))


class MaskedBenchmark(DocumentBenchmark):
    """Hidden bytes, each predicted from both sides."""

    direction = Direction.BOTH
    executed_sample = Sample(32, 1)
    subset_names = {"run": RUN_NAMES, "class": CLASS_NAMES}  # noqa: RUF012 - declared by Benchmark

    def __init__(self, name: str, documents: list[bytes], source: dict, notes: tuple[str, ...] = (), *, window: int = WINDOW):
        """
        Args:
            name, documents, source, notes: see `DocumentBenchmark`.
            window: most positions of one forward.

        Raises:
            UserError: the window is so short that nothing might be hidden in a part of it.
        """
        super().__init__(name, documents, source, notes)
        if window < SHORTEST_WINDOW:
            raise UserError(f"benchmark '{name}' has window {window}: take one, and a model, of at least {SHORTEST_WINDOW}")
        self._window = window

    def read_by(self, encoding: Encoding, max_length: int) -> "MaskedBenchmark":
        if encoding.name != BYTES.name:
            raise UserError(f"benchmark '{self.name}' hides bytes, the model reads by {encoding.name}: take a model of bytes")
        window = min(self._window, max_length)
        return MaskedBenchmark(self.name, self._documents, self._source, self.notes, window=window)

    def manifest(self) -> dict:
        return self.contents() | {
            "window": self._window,
            "encoding": BYTES.name,
            "mask": MASK,
            "mask_version": MASK_VERSION,
            "runs": list(RUN_NAMES),
            "gap": list(GAP),
        }

    def sequences(self, document: int) -> list[Sequence]:
        text = self._documents[document]
        seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
        parts = np.array_split(np.frombuffer(text, dtype=np.uint8), -(-len(text) // self._window))
        return [self._sequence(document, number, part, seed) for number, part in enumerate(parts)]

    def _sequence(self, document: int, number: int, part: np.ndarray, seed: int) -> Sequence:
        run = hidden_runs(len(part), np.random.default_rng([_STREAM, seed, number]))
        hidden, values = run >= 0, part.astype(np.int64)
        return Sequence(
            document=document,
            uid=document << 32 | number,
            tokens=np.where(hidden, MASK, values),
            targets=np.where(hidden, values, NOT_SCORED),
            codes={"run": run, "class": np.where(hidden, class_codes(part), np.int16(-1))},
        )
