"""The sweep: models x benchmarks x policies x seeds -> a run directory.

Traces each (model, benchmark, seed) once, replays every policy from the trace, acts out and times a few points, and
assembles the tables. Whatever is already on disk is kept, so the same command resumes.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from halting_bench.architectures.base import RecurrentModel
from halting_bench.assembly import executed_frames, typed_points, unit_frames, unit_rows
from halting_bench.doctor import examine
from halting_bench.errors import UserError
from halting_bench.execution import act_out, measure_points
from halting_bench.jobs import LM_EVAL, Job, Plan, manifest, plan_sweep
from halting_bench.store import RunDirectory, open_run, read_manifest, write_bytes, write_frame, write_json
from halting_bench.sweep_config import SweepConfig
from halting_bench.unit import Advance, cell_count, open_trace, run_cells, trace_unit

if TYPE_CHECKING:
    import pandas as pd


class Progress(Protocol):
    """Told what is under way; the command line draws bars, a notebook may ignore it."""

    def start(self, what: str, total: int) -> Callable[[], None]:
        """Begins a piece of work of `total` parts; the result is called once a finished part."""

    def note(self, text: str) -> None:
        """Something a person should know now."""


class Silent:
    """No progress shown."""

    def start(self, what: str, total: int) -> Callable[[], None]:
        return lambda: None

    def note(self, text: str) -> None:
        pass


def sweep(config: SweepConfig | None = None, *, out: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Runs a sweep, or resumes it.

    Args:
        config: what to do; none: the embedded default.
        out: the run directory; none: results/<run id> below the current directory.
        progress: told what is under way.

    Returns:
        The run directory: read it with `load_run`.

    Raises:
        UserError: something asked for does not exist or does not fit, or the directory cannot be written.
    """
    plan = plan_sweep(config or SweepConfig())
    folder = Path(out) if out is not None else Path("results") / plan.run_id
    with open_run(folder) as run:
        known = read_manifest(folder, missing_ok=True)
        if known and known["run_id"] != plan.run_id:
            raise UserError(f"{folder} holds another run ({known['run_id']}, not {plan.run_id}): choose another --out")
        if not known:
            write_json(run.part("manifest.json"), manifest(plan))
        if _finished(folder, plan):
            return folder
        run.log("started", run_id=plan.run_id)
        _run_jobs(run, plan, progress or Silent())
        run.log("finished", run_id=plan.run_id)
    return folder


def _finished(folder: Path, plan: Plan) -> bool:
    """Whether everything asked for is there: no cell that failed, and a trace where one is to be kept."""
    import pandas as pd

    if not (folder / "points.parquet").exists() or (plan.config.keep_trace and not (folder / "trace").exists()):
        return False
    return not (pd.read_parquet(folder / "points.parquet", columns=["status"])["status"] == "failed").any()


def _run_jobs(run: RunDirectory, plan: Plan, progress: Progress) -> None:
    import torch

    units = [unit for job in plan.jobs for unit in job.units]
    traced = progress.start("trace", sum(len(unit.documents) for unit in units))
    replayed = progress.start("replay", sum(cell_count(unit) for unit in units))
    acted = progress.start("execute", len(plan.jobs)) if plan.config.execute else None
    frames: dict[str, list[pd.DataFrame]] = {}
    for job in plan.jobs:
        model = job.source.load(dtype=getattr(torch, plan.config.dtype), device=plan.device)
        _examine(run, job, model, progress)
        for name, frame in _job_frames(run, plan, job, model, traced, replayed, acted):
            frames.setdefault(name, []).append(frame)
    _assemble(run, frames)
    if not plan.config.keep_trace:
        shutil.rmtree(run.part("trace"), ignore_errors=True)


def _job_frames(
    run: RunDirectory,
    plan: Plan,
    job: Job,
    model: RecurrentModel,
    traced: Advance,
    replayed: Advance,
    acted: Advance | None,
) -> Iterator[tuple[str, "pd.DataFrame"]]:
    """Named frames of one model on one benchmark, by the way that fits: lm-eval's, executed alone, or replayed."""
    if job.benchmark.name.startswith(LM_EVAL):
        from halting_bench.task_sweep import sweep_task  # lm-eval is imported only when a task of it is asked for

        for each in sweep_task(run, plan, job, model, traced, replayed):
            yield from each.items()
        return
    if not job.replayable:
        for unit in job.units:
            yield from executed_frames(run, plan, job, unit, model, replayed).items()
        return
    for unit in job.units:
        trace_unit(run, unit, model, job.benchmark, traced)
    opened = [open_trace(run, unit, model, job.benchmark) for unit in job.units]
    for index, unit in enumerate(job.units):
        chooser = opened[(index + 1) % len(opened)] if len(opened) > 1 else None
        rows = unit_rows(unit, job, run_cells(run, unit, opened[index], chooser, replayed))
        executed = []
        if acted and index == 0:
            executed = act_out(run, plan, job, unit, model, opened[index], rows)
            if plan.config.latency.enabled:
                yield "latency", measure_points(run, plan, job, unit, model, rows)
            acted()
        yield from unit_frames(run, plan, job, unit, opened[index], chooser, rows, executed).items()


def _examine(run: RunDirectory, job: Job, model: RecurrentModel, progress: Progress) -> None:
    """The quick self-checks. A failure is told and recorded; the sweep goes on, and its rows show what broke."""
    failed = [check for check in examine(model, quick=True) if check.verdict == "fail"]
    for check in failed:
        run.log("self_check_failed", model=job.model_name, check=check.name, figure=str(check.figure), note=check.note)
    if failed:
        names = ", ".join(check.name for check in failed)
        progress.note(f"numbers of {job.model_name} may not be believed ({names}): see halting-bench doctor")


def _assemble(run: RunDirectory, frames: dict[str, list["pd.DataFrame"]]) -> None:
    """Writes the tables of the whole run; points.parquet last, since its presence says that the run is finished."""
    import pandas as pd

    whole = {name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}
    points = typed_points(whole.pop("points"))
    for name, frame in whole.items():
        write_frame(run.part(f"{name}.parquet"), frame)
    write_bytes(run.part("points.csv"), with_latency(points, whole.get("latency")).to_csv(index=False).encode())
    write_frame(run.part("points.parquet"), points)


def with_latency(points: "pd.DataFrame", latency: "pd.DataFrame | None") -> "pd.DataFrame":
    """points.csv: the points, with the seconds of those that were timed joined to their executed (or uniform) rows."""
    import pandas as pd

    if latency is None or latency.empty:
        return points
    keys = ["model", "benchmark", "seed", "policy", "threshold"]
    names = ["device", "batch_rows", "mode", "phase", "latency_ms_per_token", "p10", "p90", "tokens_per_s"]
    names += ["speedup", "speedup_ideal", "realised_fraction", "noisy"]
    seconds = latency[[*keys, *(name for name in names if name in latency)]]
    timed = (points["evidence"] == "executed") | ((points["policy"] == "fixed") & (points["split"] == "test"))
    joined = points[timed & (points["subset"] == "all")].merge(seconds, on=keys, how="left")
    return pd.concat([points[~(timed & (points["subset"] == "all"))], joined], ignore_index=True)
