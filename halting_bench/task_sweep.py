"""The sweep of lm-eval tasks: one traced pass, every operating point scored by lm-eval itself.

Where a task generates, or a model has several loops, nothing can be replayed: there the uniform depths and the recipes'
absolute thresholds are executed.

Shapes: G operating points, M documents in sample order, N rows of a shard, R steps.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench.analysis.pareto import mark_fronts
from halting_bench.analysis.selection import iso_rows, mark_iso
from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.lm_eval_benchmark import LmEvalBenchmark
from halting_bench.details import convergence_frame
from halting_bench.engine.points import TracedUnit
from halting_bench.errors import UserError
from halting_bench.execution import choose_points
from halting_bench.jobs import Job, Plan
from halting_bench.named import is_named
from halting_bench.store import Arrays, RunDirectory, write_arrays, write_frame, write_json
from halting_bench.task_cells import Cell, acted_cells, executed_cells, replayed_cells, task_masks
from halting_bench.task_measures import Measure, read_measures
from halting_bench.task_random import random_cell
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
            yield _unit_frames(plan, job, unit, _Rows(run, unit, benchmark), cells, replayed)
        return
    for unit in job.units:
        trace_unit(run, unit, model, benchmark, traced)
    opened = [open_trace(run, unit, model, benchmark) for unit in job.units]
    for index, unit in enumerate(job.units):
        chooser = opened[(index + 1) % len(opened)] if len(opened) > 1 else None
        cells = replayed_cells(unit, opened[index], chooser, benchmark, run.part("trace", unit.key))
        acting = model if plan.config.execute and index == 0 else None
        frames = _unit_frames(plan, job, unit, _Rows(run, unit, benchmark), cells, replayed, opened[index], acting)
        frames["convergence"] = _identified(convergence_frame(opened[index]), unit)
        yield frames


@dataclass
class _Rows:
    """Cells of one unit turned into rows, from disk where they are there already."""

    run: RunDirectory
    unit: Unit
    benchmark: LmEvalBenchmark
    fixed: CellRows | None = None  # uniform depths: what the others are compared with

    def __post_init__(self) -> None:
        self.masks = task_masks(self.benchmark, self.unit)

    @property
    def primary(self) -> Measure:
        """The measure under subset `all`."""
        return next(measure for measure in self.measures if measure.primary)

    @property
    def measures(self) -> list[Measure]:
        if self.fixed is None:
            raise RuntimeError("uniform depths come first")
        return self.fixed.measures

    def of(self, cells: Iterable[Cell], evidence: str, advance: Advance) -> "tuple[list[CellRows], pd.DataFrame]":
        """Finished cells, and all their rows; a cell that fails has a row that says so.

        Raises:
            UserError: uniform depths failed: nothing can be compared.
        """
        import pandas as pd

        done: list[CellRows] = []
        blank: list[dict[str, Any]] = []
        for cell in cells:
            found = self._finished(cell)
            if isinstance(found, CellRows):
                done.append(found)
                self.fixed = self.fixed or found
            elif self.fixed is None:
                raise UserError(f"benchmark '{self.benchmark.name}': uniform depth failed ({found['error']}): see events.jsonl")
            else:
                blank.append(found)
            advance()
        frames = [cell.rows for cell in done]
        if blank:
            primary = self.primary
            told = {"subset": "all", "metric": primary.name, "higher_is_better": primary.higher_is_better, "distinct": False}
            frames.append(pd.DataFrame(blank).assign(**told))
        rows = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
        return done, _identified(rows, self.unit).assign(evidence=evidence)

    def _finished(self, cell: Cell) -> CellRows | dict[str, Any]:
        """The rows of a cell, or the one row that says why there are none."""
        import pandas as pd

        run, unit = self.run, self.unit
        file = cell.file or cell.name
        table, arrays = (run.part("cells", unit.key, f"{file}.{kind}") for kind in ("parquet", "safetensors"))
        told = run.part("cells", unit.key, "measures.json")
        if table.exists():
            kept = Arrays(arrays)
            return CellRows.read(pd.read_parquet(table), {name: kept[name] for name in kept.names}, read_measures(told))
        if cell.not_applicable:
            return blank_row(cell.name, "not_applicable", cell.not_applicable)
        try:
            found = cell_rows(cell.run(), self.benchmark.suite, unit, self.masks, self.fixed)
        except UserError:
            raise
        except Exception as error:  # one failing cell must never kill a sweep: its row says what happened
            run.log("cell_failed", unit=unit.key, policy=cell.name, error=traceback.format_exc())
            return blank_row(cell.name, "failed", f"{type(error).__name__}: {error}")
        write_json(told, [asdict(measure) for measure in found.measures])
        write_arrays(arrays, found.arrays())
        write_frame(table, found.rows)
        return found


def _unit_frames(
    plan: Plan,
    job: Job,
    unit: Unit,
    own: _Rows,
    cells: Iterator[Cell],
    advance: Advance,
    traced: TracedUnit | None = None,
    acting: RecurrentModel | None = None,
) -> dict[str, "pd.DataFrame"]:
    """The frames of one unit.

    Args:
        plan, job, unit, advance: see `sweep_task`.
        own: makes its rows.
        cells: its uniform depths, then everything else.
        traced: what the cells are replayed from, where they are; selected points then have a random control.
        acting: runs the chosen points for real, beside their replayed rows.
    """
    import pandas as pd

    evidence = "executed" if traced is None else "replayed"
    done, rows = own.of(cells, evidence, advance)
    for subset, group in rows[rows["status"] == "ok"].groupby("subset", sort=False):
        mine = group.copy()
        mark_iso(mine, next(measure for measure in own.measures if measure.subset == subset))
        rows.loc[mine.index, "role"] = mine["role"]
    rows["on_front"] = mark_fronts(rows)
    kept = _selected(rows[rows["subset"] == "all"], unit)
    if traced is not None:
        rows = _with_random(rows, own, [(cell, kept.get(cell.policy, ())) for cell in done], traced)
    repeated = rows.duplicated(["split", "subset", "fingerprint"])
    rows["distinct"] = (rows["status"] == "ok") & (rows["subset"] == "all") & ~repeated
    whole = rows[rows["subset"] == "all"]
    acted: list[CellRows] = []
    if acting is not None:
        chosen = choose_points(whole, unit.plans)
        real = acted_cells(unit, chosen, own.benchmark, acting, plan.config.kv_mode, plan.config.prefill)
        acted, found = own.of(real, "executed", lambda: None)
        found["on_front"] = mark_fronts(found)
        rows = pd.concat([rows, found.assign(distinct=False)], ignore_index=True)
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
            *(cell.documents(unit, kept.get(cell.policy, ())).assign(evidence=evidence) for cell in done),
            *(cell.documents(unit, tuple(cell.thresholds)).assign(evidence="executed") for cell in acted),
        ],
        ignore_index=True,
    )
    exits = pd.concat([cell.exits(kept.get(cell.policy, ())) for cell in done], ignore_index=True)
    told = whole.drop_duplicates(["policy", "threshold"]).set_index(["policy", "threshold"])
    return {
        "points": points,
        "per_document": _identified(documents, unit).join(told["params"], on=["policy", "threshold"]),
        "exits": _identified(exits, unit).join(told["role"], on=["policy", "threshold"]),
        "iso": _identified(iso_rows(whole, own.primary, unit.mean_recurrence), unit),
        "curves": _identified(pd.DataFrame(columns=["policy", "split", "threshold", "mean_depth", "quality"]), unit),
    }


def _with_random(
    rows: "pd.DataFrame", own: _Rows, selected: list[tuple[CellRows, tuple[float, ...]]], traced: TracedUnit
) -> "pd.DataFrame":
    """Adds the rows of random controls, and to each selected point what its control gains over uniform depth."""
    import pandas as pd

    cells = [
        random_cell(own.unit, traced, own.benchmark, cell, thresholds)
        for cell, thresholds in selected
        if thresholds and cell.policy not in CONTROLS
    ]
    if not cells:
        return rows
    _, control = own.of(cells, "replayed", lambda: None)
    ends = ("", "_lo", "_hi")
    keys = ["policy", "threshold", "split", "subset"]
    told = control.assign(policy=control["policy"].str.removeprefix("random@")).set_index(keys)
    gained = rows[keys].join(told[[f"delta_uniform{end}" for end in ends]], on=keys)
    for end in ends:
        rows[f"delta_random{end}"] = gained[f"delta_uniform{end}"]
    return pd.concat([rows, control], ignore_index=True)


def _identified(frame: "pd.DataFrame", unit: Unit) -> "pd.DataFrame":
    for column, value in (("seed", unit.seed), ("benchmark", unit.benchmark_name), ("model", unit.model_name)):
        frame.insert(0, column, value)
    return frame


def _selected(rows: "pd.DataFrame", unit: Unit) -> dict[str, tuple[float, ...]]:
    """Thresholds whose details are kept, by policy: the controls, iso-quality points, the calibration front, named points."""
    known = rows[rows["status"] == "ok"]
    named = [
        is_named(unit.named, policy, threshold) for policy, threshold in zip(known["policy"], known["threshold"], strict=True)
    ]
    front = known["on_front"] & (known["split"] == "calibration")
    keep = known[known["policy"].isin(CONTROLS) | (known["role"] == "iso") | front | np.array(named, bool)]
    return {str(policy): tuple(group["threshold"].drop_duplicates()) for policy, group in keep.groupby("policy", sort=False)}
