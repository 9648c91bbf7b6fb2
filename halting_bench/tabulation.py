"""From summed exits to rows of the points table: quality with its interval, depth, cost, and the paired comparisons.

Shapes: G operating points, M documents, R steps.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from halting_bench.analysis.statistics import mean_interval
from halting_bench.engine.controls import random_sums, uniform_at
from halting_bench.engine.points import SPLITS, Tallies, TracedUnit
from halting_bench.engine.replay import Tally
from halting_bench.records import Metric

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Points:
    """G operating points of one policy. thresholds: [G]."""

    policy: str
    thresholds: np.ndarray
    role: str
    hits: int
    min_steps: int
    params: str
    needs_logits: bool


def depth_percentile(histogram: np.ndarray, share: float) -> np.ndarray:
    """The least depth that at least `share` of the rows do not exceed, [G] from [G, R]."""
    total = np.cumsum(histogram, axis=1)
    return (total >= share * total[:, -1:]).argmax(axis=1) + 1.0


def point_rows(unit: TracedUnit, points: Points, tallies: Tallies) -> "pd.DataFrame":
    """Rows of both splits for the whole benchmark (subset `all`), with the hidden columns that later steps need.

    Hidden columns: fingerprint, delta_uniform and delta_random with their intervals (quality advantage over the
    uniform curve at equal mean depth, paired by document, positive is better), and random_quality.
    """
    import pandas as pd

    frames = []
    for split in SPLITS:
        tally, mask = tallies[split], unit.in_split(split)
        frame = outcome_columns(tally.quality[:, mask], unit.counts[mask], tally, unit.metric)
        frame.insert(0, "split", split)
        watched = np.rint(frame["core_steps"].to_numpy()).astype(np.int64)
        frame["readouts"] = watched if points.needs_logits else int(unit.counts[mask].sum())
        frame["flops_per_token"] = (tally.step_flops + unit.base_flops(points.needs_logits, split)) / unit.counts[mask].sum()
        frame["quality_full_depth"] = unit.uniform[unit.mean - 1, mask].sum() / unit.counts[mask].sum()
        frame["fingerprint"] = tally.fingerprint.astype(str)
        _compare(frame, unit, tally, mask)
        frame.insert(0, "role", points.role)
        frame.insert(0, "threshold", points.thresholds)
        frames.append(frame)
    rows = pd.concat(frames, ignore_index=True).assign(status="ok", error="")
    for name in ("policy", "hits", "min_steps", "params"):
        rows[name] = getattr(points, name)
    return rows


def outcome_columns(quality: np.ndarray, counts: np.ndarray, tally: Tally, metric: Metric) -> "pd.DataFrame":
    """Quality, depth and outcome columns of G points. quality: [G, M'] sums of the M' documents counted in `counts`."""
    import pandas as pd

    mean, low, high = mean_interval(quality, counts, bounded=metric is Metric.ACCURACY)
    tokens = int(counts.sum())
    rows = tally.histogram.sum(axis=1)
    steps = tally.histogram.shape[1]
    core = tally.histogram @ np.arange(1, steps + 1)
    return pd.DataFrame(
        {
            "n_documents": int((counts > 0).sum()),
            "n_tokens": tokens,
            "mean_depth": core / rows,
            "depth_p50": depth_percentile(tally.histogram, 0.5),
            "depth_p95": depth_percentile(tally.histogram, 0.95),
            "exhausted_fraction": (rows - tally.halted - tally.nonfinite) / rows,
            "never_fired_fraction": tally.never / rows,
            "nonfinite_fraction": tally.nonfinite / rows,
            "quality": mean,
            "quality_lo": low,
            "quality_hi": high,
            "core_steps": core,
        }
    )


def _compare(frame: "pd.DataFrame", unit: TracedUnit, tally: Tally, mask: np.ndarray) -> None:
    sign = 1 if unit.metric.higher_is_better else -1
    counts, uniform = unit.counts[mask], unit.uniform[:, mask]
    own = tally.quality[:, mask]
    same_depth = uniform_at(frame["mean_depth"].to_numpy(), uniform)
    random, _ = random_sums(tally.histogram, uniform, counts)
    for name, sums in (("delta_uniform", own), ("delta_random", random)):
        # The paired difference of every point at once.
        frame[name], frame[f"{name}_lo"], frame[f"{name}_hi"] = mean_interval(sign * (sums - same_depth), counts, bounded=False)


def random_rows(unit: TracedUnit, points: Points, tallies: Tallies) -> "pd.DataFrame":
    """The `random@policy` control of each point: the same histogram of exits, given to tokens at random."""
    expected: Tallies = {}
    for split in SPLITS:
        tally = tallies[split]
        quality, depth = random_sums(tally.histogram, unit.uniform, unit.counts)
        expected[split] = Tally(
            quality=quality,
            depth=np.rint(depth).astype(np.int64),
            histogram=tally.histogram,
            halted=tally.halted,
            never=np.zeros_like(tally.never),
            nonfinite=tally.nonfinite,
            step_flops=(tally.histogram @ np.arange(1, unit.steps + 1)) * _step_flops(unit, split),
            fingerprint=~tally.fingerprint,
        )
    control = Points(f"random@{points.policy}", points.thresholds, "control", 1, 1, points.params, needs_logits=False)
    return point_rows(unit, control, expected)


def _step_flops(unit: TracedUnit, split: str) -> float:
    """FLOPs of one core step at the mean context of a split's rows."""
    mask = unit.in_split(split)
    return unit.cost.step[0] + unit.cost.step[1] * float(unit.context_sums[mask].sum() / unit.counts[mask].sum())
