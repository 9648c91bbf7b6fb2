"""Operating points timed at one shape, each with its bracket: rows of latency.parquet."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from halting_bench.halting.policy import HaltingPolicy
from halting_bench.timing.bracket import Bracket, ratio
from halting_bench.timing.clock import Clock
from halting_bench.timing.medians import Interval
from halting_bench.timing.protocol import Protocol as Rules
from halting_bench.timing.protocol import measure
from halting_bench.timing.telemetry import Telemetry
from halting_bench.timing.workloads import Build, Work, bracket_plan

if TYPE_CHECKING:
    import pandas as pd


class OperatingPoint(Protocol):
    """A policy at a threshold. Two points of the same `key` are the same work, and timed once."""

    @property
    def name(self) -> str: ...

    @property
    def threshold(self) -> float: ...

    @property
    def key(self) -> str: ...

    def policy(self) -> HaltingPolicy: ...


@dataclass(frozen=True)
class Shape:
    """What is run at once: `length` positions of each of `batch_rows` texts, which decoding continues by `new_tokens`."""

    device: str
    batch_rows: int
    mode: str  # eager or graph
    phase: str  # prefill or decode
    length: int
    new_tokens: int = 0


def time_points(
    build: Build,
    points: Sequence[OperatingPoint],
    shape: Shape,
    *,
    max_steps: int,
    trained: int,
    rules: Rules,
    seed: int,
    clock: Clock,
    telemetry: Telemetry | None = None,
) -> "pd.DataFrame":
    """Measures points with their brackets.

    Args:
        build: the work of a policy at this shape (see `workloads.prefill` and `workloads.decoding`).
        points: in order of importance.
        shape: as in `build`.
        max_steps: R, as in `build`.
        trained: the model's mean recurrence.
        rules: the protocol.
        seed: of the order in which they run.
        clock: see `clock_for`.
        telemetry: read before and after each block.

    Returns:
        One row a point, then one a uniform depth that a bracket needed.
    """
    import pandas as pd

    policies = {point.key: point.policy() for point in points}
    plan = bracket_plan(build, policies, max_steps=max_steps, trained=trained, prompts=shape.phase == "decode")
    timings, brackets = plan.read(measure(plan.points, rules, clock, np.random.default_rng(seed), telemetry))

    def row(name: str, threshold: float, work: Work) -> dict[str, object]:
        known = {"policy": name, "threshold": threshold, **asdict(shape), "mean_depth": work.mean_depth}
        return known | timings[work.point.key].columns()

    rows = []
    for point in points:
        work = plan.policies[point.key]
        rows.append(row(point.name, point.threshold, work) | _figures(brackets[point.key]))
        if timings[point.key].status == "ok":
            rows[-1]["stages"] = json.dumps({name: round(seconds, 6) for name, seconds in work.stages(clock).items()})
    full = timings[plan.uniform[plan.trained].point.key]
    for depth, work in sorted(plan.uniform.items()):
        if work.point.key not in policies:
            against = ratio(full, timings[work.point.key])
            rows.append(row("fixed", float(depth), work) | _columns("speedup", against))
    return pd.DataFrame(rows)


def _figures(found: Bracket) -> dict[str, float]:
    names = ("speedup", "speedup_ideal", "realised_fraction")
    return {key: value for name in names for key, value in _columns(name, getattr(found, name)).items()}


def _columns(name: str, value: Interval) -> dict[str, float]:
    return {name: value.value, f"{name}_lo": value.lo, f"{name}_hi": value.hi}
