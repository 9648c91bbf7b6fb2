"""One unit of a sweep: one model on one benchmark with one seed. Traces it, then turns each policy into rows.

Every part lands in its own file, whole or not at all, so an interrupted sweep goes on where it stopped.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.base import Benchmark, Sequence
from halting_bench.engine.controls import ORACLE_PRICES, fixed_exits, oracle_exits, saturation_exits
from halting_bench.engine.points import (
    ExitSource,
    RowCost,
    Tallies,
    TracedUnit,
    choose_thresholds,
    grid_bounds,
    replay_exits,
    replay_thresholds,
)
from halting_bench.engine.replay import recorded_threshold
from halting_bench.engine.trace import TracePlan, trace
from halting_bench.errors import PolicyFailed, UserError
from halting_bench.named import Named
from halting_bench.plan import COMPLETE, PolicyPlan, shard_path, split_size, trace_shards, trace_signals
from halting_bench.store import Arrays, RunDirectory, write_arrays, write_frame, write_json
from halting_bench.tabulation import Points, point_rows, random_rows

if TYPE_CHECKING:
    import pandas as pd

Advance = Callable[[], None]


@dataclass(frozen=True)
class Unit:
    """What one unit is made of, resolved."""

    key: str  # folder under cells/ and trace/
    model_name: str
    benchmark_name: str
    seed: int
    documents: tuple[int, ...]
    sequences_each: int | None  # how many of a document's sequences are drawn; None: all
    calibration_fraction: float
    max_steps: int
    mean_recurrence: int
    shard_tokens: int
    batch_tokens: int
    plans: tuple[PolicyPlan, ...]
    named: Named = field(default_factory=dict)  # points to keep whatever else is selected

    def draw(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences of one document that this sample uses: a draw that depends on the document alone."""
        if self.sequences_each is None or len(sequences) <= self.sequences_each:
            return sequences
        chosen = np.random.default_rng([0x7365, sequences[0].uid]).choice(len(sequences), self.sequences_each, replace=False)
        return [sequences[index] for index in sorted(chosen.tolist())]

    def calibration(self) -> int:
        return split_size(len(self.documents), self.calibration_fraction)


def trace_unit(run: RunDirectory, unit: Unit, model: RecurrentModel, benchmark: Benchmark, advance: Advance) -> None:
    """Records the shards that are not there yet."""
    opaque = {plan.key(t): policy for plan in unit.plans if not plan.not_applicable for t, policy in plan.opaque}
    plan = TracePlan(trace_signals(list(unit.plans)), unit.max_steps, unit.seed, opaque, unit.batch_tokens)
    folder = run.part("trace", unit.key)
    count = 0
    for sequences in _shards(unit, benchmark, advance):
        path = shard_path(folder, count)
        if not path.exists():
            write_arrays(path, trace(model, sequences, plan))
        count += 1
    write_json(folder / COMPLETE, {"shards": count})


def _shards(unit: Unit, benchmark: Benchmark, advance: Advance) -> Iterator[list[Sequence]]:
    """The unit's sequences in order, in groups of about `shard_tokens`, made as they are needed: memory stays bounded."""
    group: list[Sequence] = []
    tokens = 0
    for document in unit.documents:
        for sequence in unit.draw(benchmark.sequences(document)):
            if group and tokens + len(sequence.tokens) > unit.shard_tokens:
                yield group
                group, tokens = [], 0
            group.append(sequence)
            tokens += len(sequence.tokens)
        advance()
    if group:
        yield group


def open_trace(run: RunDirectory, unit: Unit, model: RecurrentModel, benchmark: Benchmark) -> TracedUnit:
    """The shards of a traced unit."""
    costs = model.costs()
    row = RowCost(**{name: (costs[key].fixed, costs[key].per_context) for name, key in _STAGES.items()})
    shards = trace_shards(run.part("trace", unit.key))
    return TracedUnit(shards, list(unit.documents), unit.calibration(), benchmark.metric, row, unit.mean_recurrence)


_STAGES = {"embed": "embed", "step": "step/0", "readout": "readout"}


def run_cells(
    run: RunDirectory, unit: Unit, traced: TracedUnit, chooser: TracedUnit | None, advance: Advance
) -> list["pd.DataFrame"]:
    """Rows of the controls and of every policy of a traced unit; see `keep_cells`."""
    return keep_cells(run, unit, _cells(run, unit, traced, chooser), advance)


def keep_cells(
    run: RunDirectory, unit: Unit, cells: Iterable[tuple[str, Callable[[], "pd.DataFrame"]]], advance: Advance
) -> list["pd.DataFrame"]:
    """The rows of every cell, from disk where they are there already.

    A policy that fails becomes a row that says so; it is tried again by the next run of the same command.

    Args:
        run: where they are kept.
        unit: whose cells they are.
        cells: (name, what makes its rows).
        advance: called after each.
    """
    import pandas as pd

    frames = []
    for name, make in cells:
        path = run.part("cells", unit.key, f"{name}.parquet")
        if path.exists():
            frames.append(pd.read_parquet(path))
        else:
            try:
                frame = make()
                write_frame(path, frame)
            except UserError:  # the disk is full: nothing more can be kept
                raise
            except Exception as error:  # one failing cell must never kill a sweep: its row says what happened
                run.log("cell_failed", unit=unit.key, policy=name, error=traceback.format_exc())
                told = str(error) if isinstance(error, PolicyFailed) else f"{type(error).__name__}: {error}"
                frame = pd.DataFrame([blank_row(name, "failed", told)])
            frames.append(frame)
        advance()
    return frames


def cell_count(unit: Unit) -> int:
    return len(unit.plans) + 3


def blank_row(policy: str, status: str, error: str) -> dict[str, Any]:
    """A row without figures: what was asked and why there is none."""
    return {"policy": policy, "status": status, "error": error, "split": "test", "role": "grid", "threshold": np.nan}


def _cells(
    run: RunDirectory, unit: Unit, traced: TracedUnit, chooser: TracedUnit | None
) -> list[tuple[str, Callable[[], "pd.DataFrame"]]]:
    prices = np.array(ORACLE_PRICES)
    depths = np.arange(1.0, traced.steps + 1)
    optimistic = '{"optimistic": %s}' % ("true" if chooser is None else "false")
    cells: list[tuple[str, Callable[[], pd.DataFrame]]] = [
        ("fixed", lambda: _control(traced, "fixed", fixed_exits(traced.steps), depths, "{}")),
        ("oracle-loss", lambda: _control(traced, "oracle-loss", oracle_exits(chooser), prices, optimistic)),
        ("oracle-saturation", lambda: _control(traced, "oracle-saturation", saturation_exits, np.array([np.nan]), "{}")),
    ]
    for plan in unit.plans:
        cells.append((plan.recipe.name, lambda plan=plan: _policy_cell(run, unit, traced, plan)))  # type: ignore[misc]
    return cells


def _control(traced: TracedUnit, name: str, exits: ExitSource, thresholds: np.ndarray, params: str) -> "pd.DataFrame":
    tallies = replay_exits(traced, exits, traced.watched_step(False, 0.0))
    points = Points(name, thresholds, "control", 1, 1, params, needs_logits=False)
    return point_rows(traced, points, tallies)


def _policy_cell(run: RunDirectory, unit: Unit, traced: TracedUnit, plan: PolicyPlan) -> "pd.DataFrame":
    """Every operating point of one policy, with its random control beside it."""
    import pandas as pd

    if plan.not_applicable:
        return pd.DataFrame([blank_row(plan.recipe.name, "not_applicable", plan.not_applicable)])
    every_step = traced.watched_step(plan.needs_logits, plan.signal_flops)
    points, tallies = _replay_rule(run, unit, traced, plan, every_step) if plan.rule else _replay_grid(traced, plan, every_step)
    return pd.concat([point_rows(traced, points, tallies), random_rows(traced, points, tallies)], ignore_index=True)


def describe(plan: PolicyPlan, thresholds: np.ndarray) -> Points:
    """Operating points of a policy as the table tells them."""
    recipe = plan.recipe
    told = {"signal", "python", "router", "any_of", "all_of", "every", "jointly", "params"}
    params = recipe.model_dump_json(include=told, exclude_defaults=True)
    return Points(recipe.name, thresholds, "grid", recipe.hits, recipe.min_steps, params, plan.needs_logits)


def _replay_rule(
    run: RunDirectory, unit: Unit, traced: TracedUnit, plan: PolicyPlan, every_step: tuple[float, float]
) -> tuple[Points, Tallies]:
    rule = plan.rule
    if rule is None:
        raise ValueError("a rule is needed")
    choice = choose_thresholds(traced, rule, plan.recipe.grid.quantiles, run.part("trace", unit.key))
    arrays = {f"{split}/{name}": value for split, curve in choice.curves.items() for name, value in vars(curve).items()}
    write_arrays(run.part("cells", unit.key, f"{plan.recipe.name}.curve.safetensors"), arrays)
    bounds = grid_bounds(rule, plan.recipe.grid.absolute, choice, traced.dtype)
    thresholds = recorded_threshold(bounds, rule)
    return describe(plan, thresholds), replay_thresholds(traced, rule, bounds, every_step)


def _replay_grid(traced: TracedUnit, plan: PolicyPlan, every_step: tuple[float, float]) -> tuple[Points, Tallies]:
    thresholds = np.array(plan.recipe.grid.absolute)
    tallies = replay_exits(traced, plan.exits(thresholds.tolist()), every_step)
    return describe(plan, thresholds), tallies


def read_curves(run: RunDirectory, unit: Unit, policy: str) -> dict[str, dict[str, np.ndarray]]:
    """Of each split: threshold, mean_depth, quality of a rule's exact curve; empty for policies without one."""
    path = run.part("cells", unit.key, f"{policy}.curve.safetensors")
    if not path.exists():
        return {}
    arrays = Arrays(path)
    splits = sorted({name.partition("/")[0] for name in arrays.names})
    return {split: {name: arrays[f"{split}/{name}"] for name in ("threshold", "mean_depth", "quality")} for split in splits}
