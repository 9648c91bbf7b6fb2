"""From a traced unit (one model, one benchmark, one seed) to the points of a policy. Imports no torch.

Shapes: N rows of a shard, R steps, G operating points, M documents.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from halting_bench.engine.curve import CurveBuilder, fastest_at, sample_curve
from halting_bench.engine.replay import (
    Rows,
    Rule,
    Tally,
    running_extremum,
    signed_threshold,
    tally_exits,
    tally_thresholds,
    unsigned_threshold,
)
from halting_bench.records import Metric
from halting_bench.store import Arrays

SPLITS = ("calibration", "test")
CURVE_POINTS = 257


@dataclass(frozen=True)
class RowCost:
    """FLOPs of one row: `fixed + per_context * context` for each stage. Pairs (fixed, per_context)."""

    embed: tuple[float, float]
    step: tuple[float, float]
    readout: tuple[float, float]


class TracedUnit:
    """The shards of one traced pass, read a column at a time, so that memory is bounded by a shard."""

    def __init__(self, shards: list[Path], documents: list[int], calibration: int, metric: Metric, cost: RowCost, mean: int):
        """
        Args:
            shards: files in the order of `documents`.
            documents: ids in sample order; the first `calibration` of them are the calibration split.
            metric: what an outcome is.
            cost: the model's FLOPs a row.
            mean: the trained mean depth.
        """
        self.shards = [Arrays(path) for path in shards]
        self.documents = documents
        self.calibration = calibration
        self.metric = metric
        self.cost = cost
        self.mean = mean

    @cached_property
    def steps(self) -> int:
        return int(self.shards[0]["loss"].shape[1])

    @cached_property
    def dtype(self) -> np.dtype:
        return self.shards[0]["loss"].dtype

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array(self.documents)
        order = np.argsort(ids)
        return ids[order], order

    def document_index(self, shard: Arrays) -> np.ndarray:
        """0-based place of each row's document in the sample, [N]."""
        ids, order = self._index
        return order[np.searchsorted(ids, shard["document"])]

    def outcome(self, shard: Arrays) -> np.ndarray:
        """The metric's per-token value had a row stopped at each step, float64 [N, R]."""
        if self.metric is Metric.ACCURACY:
            return shard["correct"].astype(np.float64)
        return shard["loss"].astype(np.float64) / np.log(2)

    def context(self, shard: Arrays) -> np.ndarray:
        return shard["position"].astype(np.float64) + 1

    def rows(self, every_step: tuple[float, float]) -> Iterator[tuple[Arrays, Rows]]:
        """Shards with their rows. every_step: FLOPs (fixed, per context) of a watched step."""
        first = 0
        for shard in self.shards:
            document = self.document_index(shard)
            number = np.arange(first, first + len(document))
            first += len(document)
            flops = every_step[0] + every_step[1] * self.context(shard)
            yield shard, Rows(number, self.outcome(shard), document, shard["last_step"].astype(np.int64), flops)

    @cached_property
    def counts(self) -> np.ndarray:
        """Scored tokens a document, int64 [M]."""
        total = np.zeros(len(self.documents), np.int64)
        for shard in self.shards:
            total += np.bincount(self.document_index(shard), minlength=len(total))
        return total

    @cached_property
    def context_sums(self) -> np.ndarray:
        """Summed context lengths of the scored tokens a document, float64 [M]."""
        total = np.zeros(len(self.documents))
        for shard in self.shards:
            total += np.bincount(self.document_index(shard), self.context(shard), minlength=len(total))
        return total

    def in_split(self, split: str) -> np.ndarray:
        """Which documents belong to a split, bool [M]."""
        first = np.arange(len(self.documents)) < self.calibration
        return first if split == "calibration" else ~first

    @cached_property
    def uniform(self) -> np.ndarray:
        """Summed outcome of each document at each uniform depth, float64 [R, M]: the uniform-depth curve."""
        total = np.zeros((self.steps, len(self.documents)))
        for _, rows in self.rows((0.0, 0.0)):
            np.add.at(total.T, rows.document, rows.outcome)
        return total

    def watched_step(self, needs_logits: bool, signal_flops: float) -> tuple[float, float]:
        """FLOPs (fixed, per context) of one core step with its policy's look at it."""
        fixed, per_context = self.cost.step
        if needs_logits:
            fixed, per_context = fixed + self.cost.readout[0], per_context + self.cost.readout[1]
        return fixed + signal_flops, per_context

    def base_flops(self, needs_logits: bool, split: str) -> float:
        """FLOPs of a split's rows apart from their watched steps: prelude, and the one readout of a latent rule."""
        fixed, per_context = self.cost.embed
        if not needs_logits:
            fixed, per_context = fixed + self.cost.readout[0], per_context + self.cost.readout[1]
        mask = self.in_split(split)
        return fixed * float(self.counts[mask].sum()) + per_context * float(self.context_sums[mask].sum())


Tallies = dict[str, Tally]
"""split -> sums of its rows."""

ExitSource = Callable[[int, Arrays], np.ndarray]
"""(shard number, shard) -> the step at which each row would stop, int [G, N], R + 1 for never."""


def extrema(unit: TracedUnit, rule: Rule, every_step: tuple[float, float]) -> Iterator[tuple[np.ndarray, Rows]]:
    """Shards as (E [N, R], rows)."""
    for shard, rows in unit.rows(every_step):
        yield running_extremum(shard[f"score/{rule.signal}"], rule), rows


def replay_thresholds(unit: TracedUnit, rule: Rule, bounds: np.ndarray, every_step: tuple[float, float]) -> Tallies:
    """Both splits' sums at signed thresholds, ascending [G]."""
    totals: Tallies = {}
    for extremum, rows in extrema(unit, rule, every_step):
        for split in SPLITS:
            mask = unit.in_split(split)[rows.document]
            _accumulate(totals, split, tally_thresholds(extremum[mask], bounds, rows.take(mask), len(unit.documents)))
    return totals


def replay_exits(unit: TracedUnit, exits: ExitSource, every_step: tuple[float, float]) -> Tallies:
    """Both splits' sums at explicit exits: see ExitSource."""
    totals: Tallies = {}
    for number, (shard, rows) in enumerate(unit.rows(every_step)):
        steps = exits(number, shard)
        for split in SPLITS:
            mask = unit.in_split(split)[rows.document]
            _accumulate(totals, split, tally_exits(steps[:, mask], rows.take(mask), len(unit.documents)))
    return totals


def _accumulate(totals: Tallies, split: str, part: Tally) -> None:
    if split in totals:
        totals[split].add(part)
    else:
        totals[split] = part


@dataclass(frozen=True)
class Curve:
    """An exact curve, decimated. threshold is in the signal's own sign; arrays [P]."""

    threshold: np.ndarray
    mean_depth: np.ndarray
    quality: np.ndarray


@dataclass(frozen=True)
class ThresholdChoice:
    """What the calibration split chose."""

    curves: dict[str, Curve]
    quantiles: np.ndarray  # signed bounds at evenly spaced mean depths
    iso: float | None  # signed bound of the least mean depth at full-depth quality; None: no threshold reaches it


def choose_thresholds(unit: TracedUnit, rule: Rule, quantiles: int, scratch: Path) -> ThresholdChoice:
    """Walks the exact curves: both splits for the record, calibration for the choices.

    Rows whose state broke are left out here; they are counted where points are tallied.
    """
    curves: dict[str, Curve] = {}
    chosen = np.empty(0, unit.dtype)
    iso: float | None = None
    for split in SPLITS:
        with CurveBuilder(scratch) as builder:
            for extremum, rows in extrema(unit, rule, (0.0, 0.0)):
                mask = unit.in_split(split)[rows.document] & (rows.last_step > unit.steps)
                builder.add(extremum[mask], rows.outcome[mask])
            if not builder.rows:
                continue
            places = sample_curve(builder, unit.steps, CURVE_POINTS)
            curves[split] = Curve(unsigned_threshold(places.bound, rule), places.mean_depth, places.quality)
            if split == "calibration":
                chosen = sample_curve(builder, unit.steps, quantiles + 1).bound[1:] if quantiles else chosen
                sign = 1 if unit.metric.higher_is_better else -1
                mask = unit.in_split(split)
                full = unit.uniform[unit.mean - 1, mask].sum() / unit.counts[mask].sum()
                bound, found = fastest_at(builder, sign * full - unit.metric.tolerance, sign)
                iso = bound if found else None
    return ThresholdChoice(curves, chosen, iso)


def grid_bounds(rule: Rule, absolute: tuple[float, ...], choice: ThresholdChoice, dtype: np.dtype) -> np.ndarray:
    """The thresholds of a policy's table: absolute, quantile and iso-quality ones; signed, ascending, distinct [G]."""
    iso = [] if choice.iso is None else [choice.iso]
    return np.unique(np.concatenate((signed_threshold(np.array(absolute), rule, dtype), choice.quantiles, iso)).astype(dtype))
