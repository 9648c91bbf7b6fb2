"""What changed between two runs: each quantity as a difference, head minus base, paired by test document.

Figures at a point or along a curve are linearised means over documents; the share of the oracle gap, a ratio of differences, is
bootstrapped over documents, both runs with the same draws. All intervals are of 95 %.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from halting_bench.analysis.pairing import Controls, Figures, Incomparable, Incomplete, Pair, Point, Side, figures, first_seed
from halting_bench.analysis.pareto import hypervolume as dominated_area
from halting_bench.analysis.statistics import shift, standard_error, student_quantile
from halting_bench.store import Run

if TYPE_CHECKING:
    import pandas as pd

Figure = tuple[float | np.ndarray, np.ndarray]
"""A value, and each document's influence on it, [M]: what it adds to its error."""

SLOPE_STEP = 0.25  # core steps to each side over which a curve's slope is taken


@dataclass(frozen=True)
class Difference:
    """head - base with its interval; NaN ends where there are too few documents for one."""

    base: float
    head: float
    value: float
    lo: float
    hi: float
    point: Point | None = None  # where it was read, where that is one point
    sign_test: float = math.nan  # two-sided p of as many documents better as worse: McNemar's test where each is one answer


def quality(pair: Pair, point: Point) -> Difference:
    """At the same threshold."""
    base, head = pair.base.row(point), pair.head.row(point)
    p = sign_test(pair.head.quality[head] - pair.base.quality[base])
    return _paired(pair, pair.base.mean_quality(base), pair.head.mean_quality(head), point, sign_test=p)


def mean_depth(pair: Pair, point: Point) -> Difference:
    """At the same threshold."""
    base, head = pair.base.row(point), pair.head.row(point)
    return _paired(pair, pair.base.mean_depth(base), pair.head.mean_depth(head), point)


def flops(pair: Pair, point: Point) -> Difference:
    """Counted FLOPs a token at the same threshold; the interval is that of the mean depth, priced by a step."""
    depth = mean_depth(pair, point)
    base, head = (_flops(side, point) for side in (pair.base, pair.head))
    uniform = pair.base.points[pair.base.points["policy"] == "fixed"].sort_values("threshold")
    step = float(np.polyfit(uniform["threshold"], uniform["flops_per_token"], 1)[0]) if len(uniform) > 1 else math.nan
    half = step * (depth.hi - depth.lo) / 2
    return Difference(base, head, head - base, head - base - half, head - base + half, point)


def depth_at_equal_quality(pair: Pair, policy: str) -> Difference:
    """The least mean depth at which a policy keeps its own run's full-depth quality, as chosen on calibration documents."""
    if policy not in pair.base.iso:
        raise Incomparable(f"{policy} reaches equal quality nowhere in the baseline")
    base = Point(policy, pair.base.iso[policy])
    base_depth = pair.base.mean_depth(pair.base.row(base))
    if policy not in pair.head.iso:
        return Difference(float(base_depth[0]), math.inf, math.inf, math.inf, math.inf, base)
    head = Point(policy, pair.head.iso[policy])
    return _paired(pair, base_depth, pair.head.mean_depth(pair.head.row(head)), base)


def quality_at_equal_depth(pair: Pair, policy: str, depth: float | None = None) -> Difference:
    """Quality read off each run's exact curve at one mean depth: the baseline's at equal quality unless given.

    The interval is that of the nearest selected points, each moved along its curve (delta method).
    """
    if depth is None:
        if policy not in pair.base.iso:
            raise Incomparable(f"{policy} reaches equal quality nowhere in the baseline: give the rule a depth")
        depth = float(pair.base.mean_depth(pair.base.row(Point(policy, pair.base.iso[policy])))[0])
    return _paired(pair, _at_depth(pair.base, policy, depth), _at_depth(pair.head, policy, depth))


def hypervolume(pair: Pair, policy: str) -> Difference:
    """The area that a policy's exact curve dominates, against the cap and the baseline's quality at depth 1.

    The interval is that of the quality along the curve, read at the nearest selected points (delta method).
    """
    reference = float(pair.base.mean_quality(pair.base.row(Point("fixed", 1.0)))[0])
    return _paired(pair, _area(pair, pair.base, policy, reference), _area(pair, pair.head, policy, reference))


def gap_share(pair: Pair, policy: str) -> Difference:
    """The share of the distance from uniform depth to the loss oracle that a policy closes at its point of equal quality."""

    def share(side: Side, drawn: Controls, weights: np.ndarray) -> np.ndarray:
        if policy not in side.iso:
            raise Incomplete(f"{policy} has no point of equal quality in one of the runs")
        own = figures(side, [side.row(Point(policy, side.iso[policy]))], weights)
        return _share(pair.sign, drawn["fixed"], drawn["oracle-loss"], own)

    (base, base_draws), (head, head_draws) = (
        [share(side, drawn, weights) for drawn, weights in zip(known, (pair.whole, pair.weights), strict=True)]
        for side, known in zip((pair.base, pair.head), pair.controls, strict=True)
    )
    error = float((head_draws - base_draws).std(ddof=1))
    half = student_quantile(pair.documents) * error if pair.documents > 1 else math.nan
    value = float(head[0] - base[0])
    return Difference(float(base[0]), float(head[0]), value, value - half, value + half)


def latency(base: Run, head: Run, model: str, head_model: str, benchmark: str, point: Point) -> list[tuple[dict, Difference]]:
    """Relative change of the milliseconds a token (0.1: a tenth slower), one for each shape timed in both runs.

    Raises:
        Incomparable: other devices, threads, versions of torch or dtypes.
        Incomplete: a run was not timed at that point.
    """
    reason = machine_difference(base, head)
    if reason:
        raise Incomparable(reason)
    shape = ["batch_rows", "phase", "mode"]
    timed = [_timed(run, name, benchmark, point) for run, name in ((base, model), (head, head_model))]
    joined = timed[0].merge(timed[1], on=shape, suffixes=("_base", "_head"))
    if joined.empty:
        raise Incomplete(f"{point.policy} at threshold {point.threshold:.6g} was not timed at one shape in both runs")
    return [({name: row[name] for name in shape}, _slower(row)) for row in joined.to_dict("records")]


def machine_difference(base: Run, head: Run) -> str:
    """Why seconds of the two runs cannot be compared; empty when they can."""
    for name, read in _MACHINE.items():
        was, now = (read(run.manifest["environment"]) for run in (base, head))
        if was != now:
            return f"seconds of another {name} ({was}, {now})"
    return ""


def _device(environment: dict) -> str:
    device = environment.get("device") or {}
    if device.get("type") == "cuda":
        return f"{device.get('name')}, driver {device.get('driver')}"
    return f"{(environment.get('cpu') or {}).get('model')}, {device.get('threads')} threads"


_MACHINE: dict[str, Callable[[dict], object]] = {
    "device": _device,
    "torch": lambda environment: environment["versions"].get("torch"),
    "dtype": lambda environment: environment["dtype"],
}


def sign_test(difference: np.ndarray) -> float:
    """Two-sided exact p-value that as many documents got better as worse; 1 when none changed; NaN of what is no number."""
    from scipy.special import bdtr

    if np.isnan(difference).any():
        return math.nan
    better, worse = int((difference > 0).sum()), int((difference < 0).sum())
    return min(1.0, 2 * float(bdtr(min(better, worse), better + worse, 0.5)))


def _paired(pair: Pair, base: Figure, head: Figure, point: Point | None = None, sign_test: float = math.nan) -> Difference:
    value, error = float(head[0] - base[0]), float(standard_error(head[1] - base[1], pair.documents))
    half = student_quantile(pair.documents) * error if pair.documents > 1 else math.nan
    return Difference(float(base[0]), float(head[0]), value, value - half, value + half, point, sign_test)


def _flops(side: Side, point: Point) -> float:
    rows = side.points[side.points["policy"] == point.policy]
    rows = rows[[Point(point.policy, threshold).same(point) for threshold in rows["threshold"]]]
    if rows.empty:
        raise Incomplete(f"{point.policy} at threshold {point.threshold:.6g} is not among the points")
    return float(rows["flops_per_token"].iloc[0])


def _at_depth(side: Side, policy: str, depth: float) -> Figure:
    """Quality at a mean depth."""
    curve = _curve(side, policy)
    x, y = curve["mean_depth"].to_numpy(), curve["quality"].to_numpy()
    if not len(x) or not x[0] <= depth <= x[-1]:
        raise Incomplete(f"{policy} has no points around mean depth {depth:.3g}")
    left, right = max(depth - SLOPE_STEP, x[0]), min(depth + SLOPE_STEP, x[-1])
    at_left, here, at_right = np.interp([left, depth, right], x, y)
    slope = (at_right - at_left) / (right - left) if right > left else 0.0
    rows = side.of_policy(policy)
    row = rows[int(np.argmin(np.abs(side.mean_depth(rows)[0] - depth)))]
    return here, side.mean_quality(row)[1] - slope * side.mean_depth(row)[1]


def _area(pair: Pair, side: Side, policy: str, reference: float) -> Figure:
    """The dominated area of a curve."""
    curve = _curve(side, policy)
    x, y = curve["mean_depth"].to_numpy(), curve["quality"].to_numpy()
    gain = pair.sign * (y - reference)
    leader = np.maximum.accumulate(np.where(gain == np.maximum.accumulate(gain), np.arange(len(gain)), 0))
    width = np.where(gain[leader] > 0, np.diff(np.r_[x, pair.max_steps]), 0.0)
    width = np.bincount(leader, width, minlength=len(x))  # how far to the right each place of the curve leads
    slope = np.gradient(y, x) if len(x) > 1 else np.zeros(1)
    rows = side.of_policy(policy)
    (depth, by_depth), (_, by_quality) = side.mean_depth(rows), side.mean_quality(rows)
    nearest = np.abs(depth[:, None] - x).argmin(axis=0)
    share, moved = (np.bincount(nearest, weight, len(rows)) for weight in (width, width * slope))
    area = dominated_area(x, y, pair.higher_is_better, (float(pair.max_steps), reference))
    return area, pair.sign * (share @ by_quality - moved @ by_depth)


def _curve(side: Side, policy: str) -> "pd.DataFrame":
    """The exact curve of a rule; of a policy without one its points."""
    curve = side.curves[side.curves["policy"] == policy] if len(side.curves) else side.curves
    if not len(curve):
        curve = side.points[side.points["policy"] == policy]
    return curve.groupby("mean_depth", as_index=False)["quality"].mean().sort_values("mean_depth")


def _share(sign: int, uniform: Figures, oracle: Figures, own: Figures) -> np.ndarray:
    """In each draw [B] the share that one point has closed; NaN where the oracle is no better than uniform depth."""
    depth, quality = (values[:, 0] for values in own)
    at_same, best = (_read(depth, *control) for control in (uniform, oracle))
    room = sign * (best - at_same)
    return np.divide(sign * (quality - at_same), room, out=np.full(len(room), math.nan), where=room > 0)


def _read(x: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
    """`np.interp` of every draw at once. x: [B]; xs, ys: [B, G], in any order."""
    order = np.argsort(xs, axis=1)
    xs, ys = (np.take_along_axis(values, order, axis=1) for values in (xs, ys))
    right = np.minimum((xs < x[:, None]).sum(axis=1), xs.shape[1] - 1)
    left = np.maximum(right - 1, 0)
    (x0, y0), (x1, y1) = ([values[np.arange(len(x)), side] for values in (xs, ys)] for side in (left, right))
    way = np.divide(x - x0, x1 - x0, out=np.zeros(len(x)), where=x1 > x0)
    return y0 + np.clip(way, 0, 1) * (y1 - y0)


def _timed(run: Run, model: str, benchmark: str, point: Point) -> "pd.DataFrame":
    frame = first_seed(run.latency, model, benchmark)
    if not frame.empty:
        frame = frame[(frame["policy"] == point.policy) & (frame["status"] == "ok")]
        frame = frame[[Point(point.policy, threshold).same(point) for threshold in frame["threshold"]]]
    if frame.empty:
        raise Incomplete(f"{point.policy} at threshold {point.threshold:.6g} was not timed")
    return frame[["batch_rows", "phase", "mode", "samples_ms", "prompt_ms", "tokens_per_run"]]


def _slower(row: dict) -> Difference:
    """From raw samples: the median ratio of a head's run to a base's, minus 1."""
    base, head = (
        (np.asarray(row[f"samples_ms_{side}"], float) - row[f"prompt_ms_{side}"]) / row[f"tokens_per_run_{side}"]
        for side in ("base", "head")
    )
    value, lo, hi = np.exp(shift(np.log(head), np.log(base))) - 1
    return Difference(float(np.median(base)), float(np.median(head)), float(value), float(lo), float(hi))
