"""The seconds of a finished run's points: `halting-bench latency RUN`.

Times the points on the calibration fronts, and any that are named, in prefill and decoding at several batch sizes. What is
measured is kept at once, beside the sweep's own seconds, so the same command goes on where it stopped.
"""

import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from halting_bench.architectures.base import RecurrentModel
from halting_bench.latency_plan import LatencyRequest, Loaded, Point, Target, build_work, plan_again, shapes, targets
from halting_bench.store import Run, RunDirectory, load_run, open_run, write_bytes, write_frame
from halting_bench.sweeping.run import Progress, Silent, with_latency
from halting_bench.timing.clock import Clock, clock_for
from halting_bench.timing.points import Shape, time_points
from halting_bench.timing.protocol import Protocol
from halting_bench.timing.telemetry import telemetry_for
from halting_bench.unit import Unit

if TYPE_CHECKING:
    import pandas as pd

TOGETHER = 4
"""Points timed against each other in one go: few enough that little is lost when the command is stopped."""

UNIT = ["model", "benchmark", "seed"]
CELL = [*UNIT, "policy", "threshold"]
SHAPE = ["device", "batch_rows", "mode", "phase"]
SIZE = ["length", "new_tokens"]


def time_run(
    path: Path,
    request: LatencyRequest,
    *,
    progress: Progress | None = None,
    clock_of: Callable[[str], Clock] = clock_for,
) -> Run:
    """Times a run's points and keeps their seconds in the run directory.

    Args:
        path: a finished run.
        request: what to time. Points measured before at the same shape are kept.
        progress: told what is under way.
        clock_of: the clock of a device.

    Returns:
        The run with its new seconds.

    Raises:
        UserError: no such point, or the run does not fit what is installed now.
    """
    plan = plan_again(load_run(path), request.device)
    clock = clock_of(plan.device)
    deadline = clock.now() + request.time_budget_s
    with open_run(path) as directory:
        run, loaded = load_run(path), Loaded(plan)
        found = targets(run, plan, request.points)
        parts = sorted(_pending(run, found, loaded, request), key=lambda part: part.rank)
        advance = (progress or Silent()).start("time", len(parts))
        latency, late = run.latency, []
        for part in parts:
            left = deadline - clock.now()
            if left > 0:
                protocol = replace(request.protocol, time_budget_s=left)
                frame = _measure(directory, loaded.model(part.target), part, plan.config.kv_mode, protocol, clock)
                latency = _keep(directory, part.target.unit, latency, frame)
            else:
                late.append(part)
            advance()
        latency = _skip(directory, found, late, latency, f"no room in the time budget of {request.time_budget_s:g} s")
        write_bytes(directory.part("points.csv"), with_latency(run.points, latency).to_csv(index=False).encode())
    return load_run(path)


@dataclass(frozen=True)
class _Part:
    """A few points of one target at one shape."""

    rank: int  # place of its first point in the target's order
    target: Target
    shape: Shape
    points: tuple[Point, ...]


def _pending(run: Run, found: list[Target], loaded: Loaded, request: LatencyRequest) -> Iterator[_Part]:
    """What is not measured yet."""
    same = run.latency.reindex(columns=[*CELL, *SHAPE, *SIZE, "status"])
    done = set(same.loc[same["status"] == "ok", [*CELL, *SHAPE, *SIZE]].itertuples(index=False, name=None))
    for target in found:
        unit = target.unit
        for shape in shapes(loaded.model(target).spec, loaded.plan, request, target.longest()):
            at = tuple(asdict(shape)[name] for name in [*SHAPE, *SIZE])
            where = (unit.model_name, unit.benchmark_name, unit.seed)
            missing = [point for point in target.points if (*where, point.name, point.threshold, *at) not in done]
            for first in range(0, len(missing), TOGETHER):
                yield _Part(first, target, shape, tuple(missing[first : first + TOGETHER]))


def _measure(
    directory: RunDirectory, model: RecurrentModel, part: _Part, kv_mode: str, protocol: Protocol, clock: Clock
) -> "pd.DataFrame":
    """Rows of latency.parquet. A point that cannot run becomes a failed row and leaves the others alone."""
    import pandas as pd

    unit, telemetry = part.target.unit, telemetry_for(part.shape.device)
    try:
        frame = time_points(
            build_work(model, part.target, part.shape, kv_mode), part.points, part.shape,
            max_steps=unit.max_steps, trained=unit.mean_recurrence, rules=protocol, seed=unit.seed,
            clock=clock, telemetry=telemetry,
        )  # fmt: skip
    except Exception as error:
        if len(part.points) > 1:
            alone = [replace(part, points=(point,)) for point in part.points]
            return pd.concat([_measure(directory, model, one, kv_mode, protocol, clock) for one in alone], ignore_index=True)
        directory.log("timing_failed", unit=unit.key, point=part.points[0].key, error=traceback.format_exc())
        return _unmeasured(part, "failed", f"{type(error).__name__}: {error}".splitlines()[0])
    if telemetry:
        directory.log("telemetry", unit=unit.key, shape=asdict(part.shape), readings=telemetry.notes)
    return frame


def _skip(directory: RunDirectory, found: list[Target], late: list[_Part], latency: "pd.DataFrame", why: str) -> "pd.DataFrame":
    """Rows that say what there was no time for."""
    import pandas as pd

    for target in found:
        own = [_unmeasured(part, "skipped", why) for part in late if part.target is target]
        if own:
            latency = _keep(directory, target.unit, latency, pd.concat(own, ignore_index=True))
    return latency


def _unmeasured(part: _Part, status: str, error: str) -> "pd.DataFrame":
    import pandas as pd

    figures = ("latency_ms_per_token", "p10", "p90", "tokens_per_s", "speedup", "speedup_ideal", "realised_fraction")
    said = {**asdict(part.shape), **dict.fromkeys(figures, math.nan), "noisy": False, "status": status, "error": error}
    return pd.DataFrame([{"policy": point.name, "threshold": point.threshold, **said} for point in part.points])


def _keep(directory: RunDirectory, unit: Unit, latency: "pd.DataFrame", frame: "pd.DataFrame") -> "pd.DataFrame":
    """Adds rows to the unit's own seconds, which a resumed sweep reads, and to those of the run. Returns the latter."""
    import pandas as pd

    frame = frame.assign(model=unit.model_name, benchmark=unit.benchmark_name, seed=unit.seed)
    own = directory.part("cells", unit.key, "latency.parquet")
    write_frame(own, merged(pd.read_parquet(own) if own.exists() else pd.DataFrame(), frame))
    whole = merged(latency, frame)
    write_frame(directory.part("latency.parquet"), whole)
    return whole


def merged(old: "pd.DataFrame", new: "pd.DataFrame") -> "pd.DataFrame":
    """Both, one row a point and shape: the newer one, unless only the older was measured.

    What was measured at another length goes: seconds side by side must be of the same work.
    """
    import pandas as pd

    measured = new.loc[new["status"] == "ok", [*UNIT, *SHAPE, *SIZE]].drop_duplicates()
    if len(old):
        size = old.reindex(columns=[*UNIT, *SHAPE, *SIZE]).merge(
            measured, on=[*UNIT, *SHAPE], how="left", suffixes=("", "_now")
        )
        same = size[[f"{name}_now" for name in SIZE]].isna().all(axis=1)
        same |= (size["length"] == size["length_now"]) & (size["new_tokens"] == size["new_tokens_now"])
        old = old[same.to_numpy()]
    both = pd.concat([old, new], ignore_index=True)
    both = both[[*CELL, *(name for name in both.columns if name not in CELL)]]
    order = both.assign(measured=both["status"] == "ok").sort_values("measured", kind="stable").index
    return both.loc[order[~both.loc[order].duplicated([*CELL, *SHAPE], keep="last")]].sort_index().reset_index(drop=True)
