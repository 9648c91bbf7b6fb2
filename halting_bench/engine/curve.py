"""The exact quality-against-depth curve of a threshold rule over *all* thresholds, in bounded memory.

Each shard's changes (one per distinct running extremum, see replay.py) are sorted and spilled to disk as a run; reading
merges the runs by value range, so neither the number of documents nor of thresholds is held in memory. Imports no torch.

Shapes: N rows, R steps, P distinct extrema of a chunk.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 1 << 20  # entries merged at once


@dataclass(frozen=True)
class CurveChunk:
    """Consecutive distinct extrema, ascending, and the sums once every extremum up to and including each has fired."""

    extremum: np.ndarray  # [P]
    saved_steps: np.ndarray  # int64 [P] core steps saved against running to R
    quality_change: np.ndarray  # float64 [P] change of the summed outcome against running to R


class CurveBuilder:
    """Collects shards, then yields the curve in order. Use as a context manager: the spilled runs go with it."""

    def __init__(self, folder: Path):
        """Args: folder: where the temporary runs are spilled."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(dir=folder, prefix="curve-", suffix=".partial")
        self._runs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.rows = 0
        self.full_quality = 0.0  # summed outcome when every row runs to R

    def __enter__(self) -> "CurveBuilder":
        return self

    def __exit__(self, *error: object) -> None:
        self._runs.clear()
        self._folder.cleanup()

    def add(self, extremum: np.ndarray, outcome: np.ndarray) -> None:
        """Adds a shard's rows: E [N, R] (replay.running_extremum) and the outcome of stopping at each step [N, R]."""
        self.rows += len(extremum)
        self.full_quality += float(outcome[:, -1].sum())
        values = extremum[:, :-1].ravel()  # a rule that fires at R saved nothing
        change = (outcome[:, :-1] - outcome[:, 1:]).ravel()
        finite = values < np.inf  # minus infinity fires at any threshold
        distinct, where = np.unique(values[finite], return_inverse=True)
        if not len(distinct):
            return
        saved = np.bincount(where, minlength=len(distinct))
        changed = np.bincount(where, weights=change[finite], minlength=len(distinct))
        self._runs.append(tuple(self._spill(name, array) for name, array in (("v", distinct), ("s", saved), ("q", changed))))  # type: ignore[arg-type]

    def _spill(self, name: str, array: np.ndarray) -> np.ndarray:
        path = Path(self._folder.name) / f"{len(self._runs)}-{name}.npy"
        np.save(path, array)
        mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return mapped

    def total(self) -> int:
        """Core steps saved at the loosest threshold of all."""
        return sum(int(saved.sum()) for _, saved, _ in self._runs)

    def chunks(self) -> Iterator[CurveChunk]:
        """The whole curve, ascending, in chunks of about CHUNK entries."""
        saved_so_far, quality_so_far = 0, 0.0
        for low, high in self._ranges():
            slices = [
                slice(np.searchsorted(v, low, side="right") if low is not None else 0, np.searchsorted(v, high, side="right"))
                for v, _, _ in self._runs
            ]
            values = np.concatenate([v[part] for (v, _, _), part in zip(self._runs, slices, strict=True)])
            if not len(values):
                continue
            distinct, where = np.unique(values, return_inverse=True)
            saved = np.concatenate([s[part] for (_, s, _), part in zip(self._runs, slices, strict=True)])
            changed = np.concatenate([q[part] for (_, _, q), part in zip(self._runs, slices, strict=True)])
            steps = saved_so_far + np.cumsum(np.bincount(where, weights=saved, minlength=len(distinct))).astype(np.int64)
            quality = quality_so_far + np.cumsum(np.bincount(where, weights=changed, minlength=len(distinct)))
            saved_so_far, quality_so_far = int(steps[-1]), float(quality[-1])
            yield CurveChunk(distinct, steps, quality)

    def _ranges(self) -> Iterator[tuple[float | None, float]]:
        """Value ranges (low, high] that hold about CHUNK entries each."""
        if not self._runs:
            return
        entries = sum(len(v) for v, _, _ in self._runs)
        last = max(v[-1] for v, _, _ in self._runs)
        pieces = -(-entries // CHUNK)
        sample = np.sort(np.concatenate([v[:: max(1, len(v) // 4096)] for v, _, _ in self._runs]))
        cuts = np.unique(sample[(np.arange(1, pieces) * len(sample)) // pieces]) if pieces > 1 else np.empty(0)
        low = None
        for cut in [*cuts[cuts < last], last]:
            yield low, cut
            low = cut


@dataclass(frozen=True)
class CurvePoints:
    """Chosen places on a curve: bounds are signed thresholds (`E < bound` halts)."""

    bound: np.ndarray
    mean_depth: np.ndarray
    quality: np.ndarray


def sample_curve(builder: CurveBuilder, steps: int, count: int) -> CurvePoints:
    """At most `count` places, evenly spaced in mean depth, the strictest (never fires) and the loosest included.

    The k-th place is the strictest threshold that saves at least k / count of what the loosest saves.
    """
    rows, total = builder.rows, builder.total()
    targets = np.unique(np.ceil(np.arange(1, count) * total / max(count - 1, 1)).astype(np.int64))
    bounds, saved, quality = [], [], []
    pending: tuple[float, int, float] | None = None  # a chosen place waits for the next extremum: its bound lies between
    reached = 0
    first: float | None = None
    for chunk in builder.chunks():
        if first is None:
            first = float(chunk.extremum[0])
        if pending is not None:
            bounds.append(between(pending[0], chunk.extremum[0]))
            saved.append(pending[1])
            quality.append(pending[2])
            pending = None
        wanted = targets[(targets > reached) & (targets <= chunk.saved_steps[-1])]
        for index in np.unique(np.searchsorted(chunk.saved_steps, wanted, side="left")):
            place = (float(chunk.extremum[index]), int(chunk.saved_steps[index]), float(chunk.quality_change[index]))
            if index + 1 < len(chunk.extremum):
                bounds.append(between(chunk.extremum[index], chunk.extremum[index + 1]))
                saved.append(place[1])
                quality.append(place[2])
            else:
                pending = place
        reached = int(chunk.saved_steps[-1])
        dtype = chunk.extremum.dtype
    if first is None:
        return CurvePoints(np.empty(0), np.empty(0), np.empty(0))
    if pending is not None:
        bounds.append(between(np.asarray(pending[0], dtype)[()], None))
        saved.append(pending[1])
        quality.append(pending[2])
    bounds.insert(0, np.asarray(first, dtype)[()])  # E < the smallest extremum: fires nowhere
    depth = steps - np.array([0, *saved]) / rows
    return CurvePoints(np.array(bounds, dtype), depth, (builder.full_quality + np.array([0.0, *quality])) / rows)


def fastest_at(builder: CurveBuilder, at_least: float, sign: int) -> tuple[float, bool]:
    """The loosest-in-depth threshold whose quality is still good enough.

    Args:
        at_least: the mean outcome to reach, times `sign`.
        sign: +1 when higher outcomes are better, -1 when lower are.

    Returns:
        A signed threshold and True, or (-inf, False) when no threshold that fires anywhere reaches it.
    """
    best: tuple[Any, Any | None] | None = None
    waiting = False
    for chunk in builder.chunks():
        if waiting and best is not None:
            best = (best[0], chunk.extremum[0])
            waiting = False
        mean = sign * (builder.full_quality + chunk.quality_change) / builder.rows
        good = np.flatnonzero(mean >= at_least)
        if len(good):
            index = good[-1]
            waiting = index + 1 == len(chunk.extremum)
            best = (chunk.extremum[index], None if waiting else chunk.extremum[index + 1])
    return (float(between(*best)), True) if best is not None else (float("-inf"), False)


def between(low: Any, high: Any | None) -> Any:
    """A number b with low < b <= high, with as few significant digits as will do, in the dtype of `low` (numpy scalars)."""
    dtype = low.dtype.type
    if high is None:
        high = np.nextafter(low, dtype(np.inf)) if low == 0 else max(dtype(low * 2), dtype(low / 2))
    middle = float(low) / 2 + float(high) / 2
    for digits in range(1, 17):
        candidate = dtype(f"{middle:.{digits - 1}e}")
        if low < candidate <= high:
            return candidate
    return np.nextafter(low, dtype(np.inf))
