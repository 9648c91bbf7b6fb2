"""Points timed against each other: one against itself, which tells the noise of timing, or those of two models.

Seconds of different hours are not compared, since machines drift: both sides run in turns, in one process.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from halting_bench.architectures.base import RecurrentModel
from halting_bench.errors import UserError
from halting_bench.jobs import Plan
from halting_bench.latency_plan import (
    LatencyRequest,
    Loaded,
    Point,
    Target,
    build_work,
    plan_again,
    shapes,
    targets,
    unit_points,
)
from halting_bench.sources import find_model_source
from halting_bench.store import Run, load_run
from halting_bench.timing.clock import Clock, clock_for
from halting_bench.timing.medians import Interval, median
from halting_bench.timing.points import Shape
from halting_bench.timing.protocol import TimedPoint, Timing, measure
from halting_bench.timing.workloads import Work

if TYPE_CHECKING:
    import pandas as pd

COMPARED = 3
"""Points of each benchmark that two models are compared at, unless some are named."""


def self_test(run: Run, request: LatencyRequest, *, clock_of: Callable[[str], Clock] = clock_for) -> "pd.DataFrame":
    """Times the most important point of a run against itself at every shape: without noise the ratio would be 1.

    Returns:
        One row a shape: see `_Race.row`.
    """
    import pandas as pd

    plan = plan_again(run, request.device)
    target = next(target for target in targets(run, plan, request.points) if target.points)
    model, point = Loaded(plan).model(target), target.points[0]
    race = _Race(request, clock_of(plan.device))
    measured = shapes(model.spec, plan, request, target.longest())
    rows: list[dict[str, object]] = []
    for shape in measured:
        work = build_work(model, target, shape, plan.config.kv_mode)(point.key, point.policy())
        rows.append(race.row(target, point, shape, work, work, among=len(measured) - len(rows)))
    return pd.DataFrame(rows)


class _Race:
    """Times pairs of works in turns, within the time of a request."""

    def __init__(self, request: LatencyRequest, clock: Clock):
        self._request, self._clock = request, clock
        self._deadline = clock.now() + request.time_budget_s

    def row(self, target: Target, point: Point, shape: Shape, here: Work, there: Work, *, among: int) -> dict[str, object]:
        """What was timed; of both sides mean depth, milliseconds a token and `noise` (relative half-width of the median's
        interval); and `ratio`, the seconds of the other side over those of this one, with its interval.

        Args:
            target, point, shape: what is timed.
            here, there: the work of each side.
            among: how many rows, this one included, share the time that is left.
        """
        own = self._request.protocol
        left = max(self._deadline - self._clock.now(), 0.0)
        # The runs that a figure needs are made while there is time; those that only narrow it have the row's share of that.
        enough = min(own.max_time_s, left / among / 2) or own.max_time_s
        racers = [TimedPoint("here", here.point.run), TimedPoint("there", there.point.run)]
        generator = np.random.default_rng(target.unit.seed)
        first, second = measure(racers, replace(own, time_budget_s=left, max_time_s=enough), self._clock, generator)
        found = _times_as_long(first, second)
        row: dict[str, object] = {"model": target.unit.model_name, "benchmark": target.unit.benchmark_name}
        row |= {"policy": point.name, "threshold": point.threshold, **asdict(shape)}
        for side, work, timing in (("", here, first), ("other_", there, second)):
            row[f"{side}mean_depth"] = work.mean_depth
            row[f"{side}latency_ms_per_token"] = timing.columns()["latency_ms_per_token"]
            row[f"{side}noise"] = timing.seconds().relative_half_width
        told = next((timing for timing in (first, second) if timing.status != "ok"), first)
        error = told.error
        if told.status == "skipped":
            error = f"no room in {self._request.time_budget_s:g} s: type a larger --time-budget"
        row |= {"ratio": found.value, "ratio_lo": found.lo, "ratio_hi": found.hi}
        return row | {"noisy": first.noisy or second.noisy, "status": told.status, "error": error}


def _times_as_long(first: Timing, second: Timing) -> Interval:
    """The median over rounds of the second's seconds in the first's, with its 95 % interval; NaN where one was not timed.

    Both take turns, so what slows the machine for a while slows both runs of a round, and their ratio does not see it.
    """
    rounds = min(len(first.samples_s), len(second.samples_s))  # one may go on alone once the other is known well enough
    here, there = (np.array(timing.samples_s[:rounds]) - timing.prompt_s for timing in (first, second))
    if not (first.status == second.status == "ok" and (here > 0).all()):
        return Interval()
    return median((there / here).tolist(), 0.95)


@dataclass(frozen=True)
class _Other:
    """The other side of a comparison for one target."""

    model: RecurrentModel
    max_steps: int
    thresholds: dict[str, float]  # policy -> its point of equal quality there

    def point(self, point: Point) -> Point:
        """A rule's own point of equal quality where that is known, for scores differ in scale; else the same threshold."""
        return replace(point, threshold=self.thresholds.get(point.name, point.threshold))


def against(run: Run, other: str, request: LatencyRequest, *, clock_of: Callable[[str], Clock] = clock_for) -> "pd.DataFrame":
    """Times points of a run against the same policies on another model.

    Args:
        run: whose points, texts and shapes are used.
        other: a run directory, whose models and points of equal quality are used; or a model (see `find_model_source`).
        request: the named points, or the most important ones of each benchmark.
        clock_of: the clock of a device.

    Returns:
        One row a point and shape: see `_Race.row`, and `other_threshold`. A ratio above 1: the other model is slower.

    Raises:
        UserError: the other model cannot read the run's tokens, or there is nothing in common.
    """
    import pandas as pd

    plan = plan_again(run, request.device)
    loaded, opponent = Loaded(plan), _opponent(other, plan)
    race = _Race(request, clock_of(plan.device))
    rows = []
    found = targets(run, plan, request.points)
    for number, target in enumerate(found):
        facing = opponent(target)
        if facing is None:
            continue
        model = loaded.model(target)
        sizes = model.spec.vocab_size, facing.model.spec.vocab_size
        if sizes[1] < sizes[0]:
            raise UserError(
                f"{other} knows {sizes[1]} tokens and {target.unit.model_name} {sizes[0]}: give a model of the same tokens"
            )
        there = replace(target, unit=replace(target.unit, max_steps=facing.max_steps))
        measured, points = shapes(model.spec, plan, request, target.longest()), target.points[: len(request.points) or COMPARED]
        own_left = len(measured) * len(points)
        for shape in measured:
            build = build_work(model, target, shape, plan.config.kv_mode)
            build_there = build_work(facing.model, there, shape, plan.config.kv_mode)
            for point in points:
                rival = facing.point(point)
                works = build(point.key, point.policy()), build_there(rival.key, rival.policy())
                row = race.row(target, point, shape, *works, among=own_left * (len(found) - number))
                rows.append(row | {"other_threshold": rival.threshold})
                own_left -= 1
    if not rows:
        raise UserError(f"{run.path} and {other} have no benchmark in common: give a model, to be timed on the same texts")
    return pd.DataFrame(rows)


def _opponent(other: str, plan: Plan) -> Callable[[Target], _Other | None]:
    """The other side of each target."""
    if (Path(other) / "manifest.json").exists():
        return _opposing_run(load_run(other), plan.device)
    import torch

    model = find_model_source(other).load(dtype=getattr(torch, plan.config.dtype), device=plan.device)
    spec = model.spec

    def facing(target: Target) -> _Other:
        steps = target.unit.max_steps
        return _Other(model, min(steps, spec.mean_recurrence) if spec.fixed_recurrence else steps, {})

    return facing


def _opposing_run(run: Run, device: str) -> Callable[[Target], _Other | None]:
    plan = plan_again(run, device)
    loaded = Loaded(plan)

    def facing(target: Target) -> _Other | None:
        for job in plan.jobs:
            if job.benchmark_hash == target.job.benchmark_hash:
                unit = job.units[0]
                rows = unit_points(run, unit)
                iso = rows[(rows["role"] == "iso") & (rows["split"] == "calibration")]
                thresholds = dict(zip(iso["policy"], iso["threshold"], strict=True))
                return _Other(loaded.model(Target(job, unit, ())), unit.max_steps, thresholds)
        return None

    return facing
