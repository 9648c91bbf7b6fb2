"""The sweep of lm-eval tasks: one traced pass, every operating point scored by lm-eval itself.

Where a task generates, or a model has several loops, nothing can be replayed: there the uniform depths and the recipes'
absolute thresholds are executed, one run a point.

Shapes: G operating points, M documents in sample order, N rows of a shard, R steps.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench.analysis.pareto import mark_fronts
from halting_bench.analysis.selection import iso_rows, mark_iso
from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.lm_eval_benchmark import LmEvalBenchmark
from halting_bench.details import convergence_frame
from halting_bench.errors import UserError
from halting_bench.execution import choose_points
from halting_bench.jobs import Job, Plan
from halting_bench.store import Arrays, RunDirectory, write_arrays, write_frame, write_json
from halting_bench.task_cells import Cell, Group, acted_cells, executed_cells, replayed_cells, task_masks
from halting_bench.task_measures import Measure, read_measures
from halting_bench.task_rows import CellRows, cell_rows
from halting_bench.unit import Unit, blank_row, open_trace, trace_unit

if TYPE_CHECKING:
    import pandas as pd

Advance = Callable[[], None]
CONTROLS = ("fixed", "oracle-loss", "oracle-saturation")


def sweep_task(
    run: RunDirectory, plan: Plan, job: Job, model: RecurrentModel, traced: Advance, replayed: Advance
) -> Iterator[dict[str, "pd.DataFrame"]]:
    """All frames of each unit (one a seed) of a job whose benchmark is an LmEvalBenchmark.

    Args:
        run, plan, job, model: as in sweep.
        traced, replayed: called after each shard and each cell.

    Raises:
        UserError: the tasks have no documents, or no metric.
    """
    benchmark = job.benchmark
    if not isinstance(benchmark, LmEvalBenchmark):
        raise TypeError(f"benchmark '{benchmark.name}' is not of lm-eval")
    if benchmark.suite.generates or not job.replayable:
        for unit in job.units:
            cells = executed_cells(unit, benchmark, model, plan.config.kv_mode, plan.config.prefill)
            yield _unit_frames(run, plan, job, unit, benchmark, cells, "executed", replayed)
        return
    for unit in job.units:
        trace_unit(run, unit, model, benchmark, traced)
    opened = [open_trace(run, unit, model, benchmark) for unit in job.units]
    for index, unit in enumerate(job.units):
        chooser = opened[(index + 1) % len(opened)] if len(opened) > 1 else None
        cells = replayed_cells(unit, opened[index], chooser, benchmark, run.part("trace", unit.key))
        acting = model if plan.config.execute and index == 0 else None
        frames = _unit_frames(run, plan, job, unit, benchmark, cells, "replayed", replayed, acting)
        frames["convergence"] = _identified(convergence_frame(opened[index]), unit)
        yield frames


def _unit_frames(
    run: RunDirectory,
    plan: Plan,
    job: Job,
    unit: Unit,
    benchmark: LmEvalBenchmark,
    cells: Iterator[Cell],
    evidence: str,
    advance: Advance,
    acting: RecurrentModel | None = None,
) -> dict[str, "pd.DataFrame"]:
    """The frames of one unit. acting: runs the chosen points for real, beside their replayed rows."""
    import pandas as pd

    masks = task_masks(benchmark, unit)
    done: dict[str, CellRows] = {}
    failed: list[dict[str, Any]] = []
    for cell in cells:
        found = _finished(run, unit, cell, benchmark, masks, done.get("fixed"), failed)
        if found is not None:
            done[cell.name] = found
        advance()
    if "fixed" not in done:
        raise UserError(f"benchmark '{benchmark.name}': uniform depth failed ({failed[0]['error']}): see events.jsonl")
    primary = _primary(done)
    rows = pd.concat([cell.rows for cell in done.values()], ignore_index=True)
    if failed:
        blank = pd.DataFrame(failed).assign(subset="all", metric=primary.name, higher_is_better=primary.higher_is_better)
        rows = pd.concat([rows, blank], ignore_index=True)
    rows = _identified(rows, unit).assign(evidence=evidence)
    for _, group in rows.groupby("subset", sort=False):
        _choose(rows, group, done)
    repeated = rows.duplicated(["split", "subset", "fingerprint"])
    rows["distinct"] = (rows["status"] == "ok") & (rows["subset"] == "all") & ~repeated
    acted: list[CellRows] = []
    lost: list[dict[str, Any]] = []
    if acting is not None:
        chosen = choose_points(rows[rows["subset"] == "all"], unit.plans)
        for cell in acted_cells(unit, chosen, benchmark, acting, plan.config.kv_mode, plan.config.prefill):
            if (found := _finished(run, unit, cell, benchmark, masks, done["fixed"], lost)) is not None:
                acted.append(found)
        real = [_identified(cell.rows.copy(), unit).assign(evidence="executed", distinct=False) for cell in acted]
        if lost:
            blank = pd.DataFrame(lost).assign(subset="all", metric=primary.name, higher_is_better=primary.higher_is_better)
            real.append(_identified(blank, unit).assign(evidence="executed", distinct=False))
        rows = pd.concat([rows, *real], ignore_index=True)
    rows["on_front"] = mark_fronts(rows)
    replay = rows["evidence"] == evidence
    whole = rows[(rows["subset"] == "all") & replay]
    kept = _selected(whole)
    executed = rows["evidence"] == "executed"
    points = rows.assign(
        run_id=plan.run_id,
        model_hash=job.model_hash,
        scope="token",
        max_steps=unit.max_steps,
        prefill=np.where(executed, plan.config.prefill, "adaptive"),
        kv_mode=np.where(executed, plan.config.kv_mode, "full"),
        dtype=plan.config.dtype,
    )
    points["depth_per_loop"] = points["mean_depth"].map(lambda depth: f"[{depth:.6g}]" if depth == depth else "")
    documents = pd.concat(
        [
            *(cell.documents(unit, kept.get(name, ())).assign(evidence=evidence) for name, cell in done.items()),
            *(cell.documents(unit, tuple(cell.thresholds)).assign(evidence="executed") for cell in acted),
        ],
        ignore_index=True,
    )
    exits = pd.concat([cell.exits(kept.get(name, ())) for name, cell in done.items()], ignore_index=True)
    told = whole.drop_duplicates(["policy", "threshold"]).set_index(["policy", "threshold"])
    return {
        "points": points,
        "per_document": _identified(documents, unit).join(told["params"], on=["policy", "threshold"]),
        "exits": _identified(exits, unit).join(told["role"], on=["policy", "threshold"]),
        "iso": _identified(iso_rows(whole, primary, unit.mean_recurrence), unit),
        "curves": _identified(pd.DataFrame(columns=["policy", "split", "threshold", "mean_depth", "quality"]), unit),
    }


def _finished(
    run: RunDirectory,
    unit: Unit,
    cell: Cell,
    benchmark: LmEvalBenchmark,
    masks: dict[Group, np.ndarray],
    fixed: CellRows | None,
    failed: list[dict[str, Any]],
) -> CellRows | None:
    """The rows of a cell, from disk where they are there already. A cell that fails leaves a row that says so."""
    import pandas as pd

    file = cell.file or cell.name
    table, arrays = (run.part("cells", unit.key, f"{file}.{kind}") for kind in ("parquet", "safetensors"))
    told = run.part("cells", unit.key, "measures.json")
    if table.exists():
        kept = Arrays(arrays)
        return CellRows.read(pd.read_parquet(table), {name: kept[name] for name in kept.names}, read_measures(told))
    if cell.not_applicable:
        failed.append(blank_row(cell.name, "not_applicable", cell.not_applicable))
        return None
    try:
        found = cell_rows(cell.run(), benchmark.suite, unit, masks, fixed)
    except UserError:
        raise
    except Exception as error:  # one failing cell must never kill a sweep: its row says what happened
        run.log("cell_failed", unit=unit.key, policy=cell.name, error=traceback.format_exc())
        failed.append(blank_row(cell.name, "failed", f"{type(error).__name__}: {error}"))
        return None
    write_json(told, [asdict(measure) for measure in found.measures])
    write_arrays(arrays, found.arrays())
    write_frame(table, found.rows)
    return found


def _identified(frame: "pd.DataFrame", unit: Unit) -> "pd.DataFrame":
    for column, value in (("seed", unit.seed), ("benchmark", unit.benchmark_name), ("model", unit.model_name)):
        frame.insert(0, column, value)
    return frame


def _primary(done: dict[str, CellRows]) -> Measure:
    return next(measure for measure in done["fixed"].measures if measure.primary)


def _choose(rows: "pd.DataFrame", group: "pd.DataFrame", done: dict[str, CellRows]) -> None:
    """Marks the iso-quality points of one measure."""
    measure = next(m for m in done["fixed"].measures if m.subset == group["subset"].iloc[0])
    mine = group.copy()
    mark_iso(mine, measure)
    rows.loc[mine.index, "role"] = mine["role"]


def _selected(rows: "pd.DataFrame") -> dict[str, tuple[float, ...]]:
    """Thresholds whose details are kept, by policy: the controls, iso-quality points and the calibration front."""
    known = rows[rows["status"] == "ok"]
    keep = known[
        known["policy"].isin(CONTROLS) | (known["role"] == "iso") | (known["on_front"] & (known["split"] == "calibration"))
    ]
    return {str(policy): tuple(group["threshold"].drop_duplicates()) for policy, group in keep.groupby("policy", sort=False)}
