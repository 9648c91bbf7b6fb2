"""From answered points to rows of the points table: lm-eval's own metrics, with intervals, depth and cost.

Shapes: G operating points, M documents in sample order, R steps.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench.analysis.statistics import paired_difference
from halting_bench.benchmarks.asks import Answer
from halting_bench.benchmarks.lm_eval_benchmark import numbered
from halting_bench.benchmarks.lm_eval_bridge import Suite
from halting_bench.benchmarks.lm_eval_results import first_broken
from halting_bench.details import histogram_frame
from halting_bench.engine.controls import uniform_at
from halting_bench.errors import UserError
from halting_bench.records import Metric
from halting_bench.tabulation import outcome_columns
from halting_bench.task_cells import ALL, Group, Ran
from halting_bench.task_measures import Measure, Values, document_values, has_value, mean_matrix, measures, summarise
from halting_bench.unit import Unit

if TYPE_CHECKING:
    import pandas as pd

Answers = dict[int, list[Answer]]
"""Index of the question -> one answer a repeat."""

SPLITS = ("calibration", "test", ALL)
"""`all` is what one lm-eval run over the whole sample says."""


_ARRAYS = ("thresholds", "counts", "depth", "histogram", "scored")


@dataclass
class CellRows:
    """The finished rows of one policy, and what later steps need of it."""

    rows: "pd.DataFrame"
    measures: list[Measure]
    thresholds: np.ndarray  # [G]
    counts: np.ndarray  # int64 [G, M] tokens
    depth: np.ndarray  # int64 [G, M] core steps
    histogram: np.ndarray  # int64 [2, G, R] of the calibration and of the test documents
    scored: np.ndarray  # int64 [M], 1 where the measure under subset `all` has a value
    values: dict[str, np.ndarray]  # subset -> float64 [G, M] of metrics that are means over documents; 0: not defined

    @property
    def policy(self) -> str:
        return str(self.rows["policy"].iloc[0])

    def arrays(self) -> dict[str, np.ndarray]:
        """What is kept beside the table."""
        kept = {name: getattr(self, name) for name in _ARRAYS}
        return kept | {f"values/{subset}": value for subset, value in self.values.items()}

    @classmethod
    def read(cls, rows: "pd.DataFrame", arrays: dict[str, np.ndarray], known: list[Measure]) -> "CellRows":
        """The inverse of writing `rows` and `arrays()`."""
        values = {name.removeprefix("values/"): array for name, array in arrays.items() if name.startswith("values/")}
        kept = {name: arrays[name] for name in _ARRAYS}
        return cls(rows, known, values=values, **kept)

    def is_one_of(self, thresholds: tuple[float, ...]) -> np.ndarray:
        """Which points have one of these thresholds, bool [G]; NaN equals NaN."""
        wanted = np.array(thresholds, np.float64)
        equal = (self.thresholds[:, None] == wanted) | (np.isnan(self.thresholds)[:, None] & np.isnan(wanted))
        return equal.any(axis=1)

    def exits(self, thresholds: tuple[float, ...]) -> "pd.DataFrame":
        """Exit histograms of some points over the test documents."""
        chosen = np.flatnonzero(self.is_one_of(thresholds))
        return histogram_frame(self.policy, self.thresholds[chosen], "all", self.histogram[1, chosen])

    def documents(self, unit: Unit, thresholds: tuple[float, ...]) -> "pd.DataFrame":
        """Rows by document of some points, for paired statistics; a document that has a value weighs 1 (`quality_count`)."""
        import pandas as pd

        primary = next(measure for measure in self.measures if measure.primary)
        chosen = np.flatnonzero(self.is_one_of(thresholds))
        quality = self.values.get(primary.subset, np.full(self.depth.shape, np.nan))
        splits = np.where(np.arange(len(unit.documents)) < unit.calibration(), "calibration", "test")
        return pd.DataFrame(
            {
                "policy": self.policy,
                "threshold": np.repeat(self.thresholds[chosen], len(splits)),
                "split": np.tile(splits, len(chosen)),
                "document": np.tile(np.array(unit.documents), len(chosen)),
                "n_tokens": self.counts[chosen].ravel(),
                "quality_sum": quality[chosen].ravel(),
                "quality_count": np.tile(self.scored, len(chosen)),
                "depth_sum": self.depth[chosen].ravel(),
            }
        )


def cell_rows(ran: Ran, suite: Suite, unit: Unit, masks: dict[Group, np.ndarray], fixed: CellRows | None) -> CellRows:
    """Scores every point of a cell by lm-eval; equal answers once.

    Args:
        ran: the points.
        suite: the tasks.
        unit: tells the splits.
        masks: see task_cells.task_masks.
        fixed: the uniform depths, to compare with; None when they are what is scored.
    """
    import pandas as pd

    place = numbered(suite, unit.documents)
    found, by_subset = _values(ran, suite, fixed.measures if fixed else [], place)
    counts = np.broadcast_to(ran.counts, (len(ran.points.thresholds), len(place)))
    cell = CellRows(
        rows=pd.DataFrame(),
        measures=found,
        thresholds=ran.points.thresholds.astype(np.float64),
        counts=np.ascontiguousarray(counts),
        depth=ran.tallies[ALL, ALL].depth,
        histogram=np.stack([ran.tallies[ALL, split].histogram for split in ("calibration", "test")]),
        scored=has_value(by_subset[next(measure.subset for measure in found if measure.primary)]).astype(np.int64),
        values={},
    )
    frames = []
    for measure in found:
        group = measure.tasks[0] if measure.subset.startswith("task:") else ALL
        if (group, ALL) not in ran.tallies:
            continue
        values = by_subset[measure.subset]
        if measure.is_mean:
            cell.values[measure.subset] = mean_matrix(values)
        for split in SPLITS:
            mask = masks[group, split]
            if mask.any():
                frames.append(_measure_rows(ran, suite, measure, values, (group, split), mask, cell, fixed or cell))
    rows = pd.concat(frames, ignore_index=True)
    uniform = rows if fixed is None else fixed.rows
    reference = uniform[uniform["threshold"] == unit.mean_recurrence].set_index(["subset", "split"])["quality"]
    rows["quality_full_depth"] = [reference.get(key, np.nan) for key in zip(rows["subset"], rows["split"], strict=True)]
    cell.rows = rows
    return cell


def _values(ran: Ran, suite: Suite, known: list[Measure], place: np.ndarray) -> tuple[list[Measure], dict[str, Values]]:
    """What there is to measure, and its values by subset: every distinct set of answers is scored by lm-eval once.

    Args:
        known: what is measured, where that is known; else the first scores tell.
    """
    seen: dict[bytes, dict[str, list[Any]] | None] = {}  # None: an answer is not a number

    def read(answers: Answers, judge: Callable[[Answers], dict[str, Any]]) -> dict[str, list[Any]] | None:
        nonlocal known
        key = hashlib.sha256(repr(answers).encode()).digest()
        if key not in seen:
            seen[key] = None
            if first_broken(answers) is None:
                result = judge(answers)
                known = known or measures(suite, result)
                seen[key] = {measure.subset: document_values(suite, result, measure, place) for measure in known}
        return seen[key]

    points = []
    for point in range(len(ran.points.thresholds)):
        drawn = ran.answers(point)
        points.append([read(answers, suite.samples if len(drawn) > 1 else suite.score) for answers in drawn])
    if not known:
        raise UserError(
            f"no point of {ran.points.policy} has answers that are numbers: the model's states break (see halting-bench doctor)"
        )
    broken = [math.nan] * len(place)
    return known, {
        measure.subset: [[broken if draw is None else draw[measure.subset] for draw in drawn] for drawn in points]
        for measure in known
    }


def _measure_rows(
    ran: Ran,
    suite: Suite,
    measure: Measure,
    values: Values,
    group: Group,
    mask: np.ndarray,
    cell: CellRows,
    fixed: CellRows,
) -> "pd.DataFrame":
    """Rows of every point for one measure and split."""
    tally, points = ran.tallies[group], ran.points
    tokens = cell.counts[:, mask].sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        frame = outcome_columns(np.zeros((len(values), 1)), np.ones(1), tally, Metric.ACCURACY)
    frame["n_documents"], frame["n_tokens"] = int((mask & has_value(values)).sum()), tokens
    frame["quality"], frame["quality_lo"], frame["quality_hi"] = summarise(suite, measure, values, mask)
    frame["readouts"] = frame["core_steps"] if points.needs_logits else tokens
    with np.errstate(divide="ignore", invalid="ignore"):  # documents of which nothing is scored
        frame["flops_per_token"] = (tally.step_flops + ran.base_flops[group]) / tokens
    frame["fingerprint"] = tally.fingerprint.astype(str)
    _compare(frame, measure, mask & has_value(values), cell, fixed)
    broken = frame["quality"].isna().to_numpy()
    return frame.assign(
        policy=points.policy,
        threshold=points.thresholds,
        params=points.params,
        hits=points.hits,
        min_steps=points.min_steps,
        role=points.role,
        split=group[1],
        subset=measure.subset,
        metric=measure.name,
        higher_is_better=measure.higher_is_better,
        status=np.where(broken, "failed", "ok"),
        error=np.where(broken, f"{measure.name} is not a number: the model's states broke, or no document counts for it", ""),
    )


def _compare(frame: "pd.DataFrame", measure: Measure, mask: np.ndarray, cell: CellRows, fixed: CellRows) -> None:
    """Advantage over uniform depth at equal mean depth, paired by document; only means over documents have one."""
    names = [f"delta_{name}{end}" for name in ("uniform", "random") for end in ("", "_lo", "_hi")]
    frame[names] = np.nan
    uniform = fixed.values.get(measure.subset)
    if uniform is None or len(fixed.thresholds) < int(fixed.thresholds[-1]):  # with gaps there is no curve to lie on
        return
    sign = 1 if measure.higher_is_better else -1
    same_depth = uniform_at(frame["mean_depth"].to_numpy(), uniform[:, mask])
    weight = np.ones(int(mask.sum()))
    own = cell.values[measure.subset][:, mask]
    found = [paired_difference(sign * a, sign * b, weight) for a, b in zip(own, same_depth, strict=True)]
    frame[names[:3]] = np.array(found)
