"""Chosen points, acted out: which ones, their executed rows, and their measured seconds.

Which points are executed depends on counted cost alone, never on the clock. Shapes: N scored positions, M documents,
R steps.
"""

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.base import Sequence
from halting_bench.engine.points import TracedUnit
from halting_bench.engine.replay import Tally, row_tokens
from halting_bench.engine.score import Executed, execute
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.jobs import Job, Plan
from halting_bench.plan import PolicyPlan, build_policy
from halting_bench.records import Metric, Outcome
from halting_bench.store import RunDirectory, write_frame
from halting_bench.tabulation import outcome_columns
from halting_bench.timing.clock import clock_for
from halting_bench.timing.points import Shape, time_points
from halting_bench.timing.workloads import fixed_length, prefill
from halting_bench.unit import Unit, blank_row

if TYPE_CHECKING:
    import pandas as pd

FASTER, SLOWER = 0.75, 1.25  # cost of the two neighbours, relative to the iso-quality point


@dataclass(frozen=True)
class ChosenPoint:
    """An operating point to act out."""

    plan: PolicyPlan
    threshold: float

    @property
    def name(self) -> str:
        return self.plan.recipe.name

    @property
    def key(self) -> str:
        return f"{self.name}@{self.threshold!r}"

    def policy(self) -> HaltingPolicy:
        return build_policy(self.plan.recipe, self.threshold)


def choose_points(rows: "pd.DataFrame", plans: tuple[PolicyPlan, ...]) -> list[ChosenPoint]:
    """Up to three points: the cheapest of equal quality, a faster one of the same rule, and a slower one.

    By FLOPs on the calibration documents, where a rule that reads logits pays for its readouts. The slower one is the
    cheapest of equal quality among rules of the other kind (those that look at the state alone, or those that read
    logits), since the two kinds part ways when they act; where there is none, it is a stricter threshold of the first
    rule. Without any rule that reaches full-depth quality, the one that comes nearest stands in for the first.

    Args:
        rows: of one unit, both splits, with roles marked.
    """
    import pandas as pd

    by_name = {plan.recipe.name: plan for plan in plans}
    known = rows[(rows["split"] == "calibration") & (rows["status"] == "ok") & rows["policy"].isin(by_name)]
    iso = known[known["role"] == "iso"]
    if known.empty:
        return []
    if iso.empty:
        distance = (known["quality"] - known["quality_full_depth"]).abs()
        iso = known[distance == distance.min()]
    iso = iso.sort_values(["flops_per_token", "policy"], kind="stable")
    first = iso.iloc[0]
    reads = {name: plan.needs_logits for name, plan in by_name.items()}
    others = iso[iso["policy"].map(reads) != reads[first["policy"]]]
    same = known[(known["policy"] == first["policy"]) & (known["threshold"] != first["threshold"])]
    faster = _nearest(same[same["flops_per_token"] < first["flops_per_token"]], FASTER * first["flops_per_token"])
    slower = _nearest(same[same["flops_per_token"] > first["flops_per_token"]], SLOWER * first["flops_per_token"])
    chosen = pd.concat([iso.iloc[:1], faster, others.iloc[:1] if len(others) else slower])
    pairs = zip(chosen["policy"], chosen["threshold"], strict=True)
    return [ChosenPoint(by_name[policy], float(threshold)) for policy, threshold in pairs]


def _nearest(points: "pd.DataFrame", flops: float) -> "pd.DataFrame":
    """The one row whose cost is nearest; none of none."""
    return points.loc[[(points["flops_per_token"] - flops).abs().idxmin()]] if len(points) else points


def execute_point(
    model: RecurrentModel,
    sequences: list[Sequence],
    point: ChosenPoint,
    traced: TracedUnit,
    *,
    max_steps: int,
    seed: int,
    kv_mode: str,
    prefill: str,
) -> tuple["pd.DataFrame", "pd.DataFrame"]:
    """Runs one point on the test documents' sequences.

    Returns:
        Its row of the points table and its rows by document (evidence `executed`).
    """
    import pandas as pd

    done = execute(model, sequences, point.policy(), max_steps=max_steps, kv_mode=kv_mode, prefill=prefill, seed=seed)
    index = {document: place for place, document in enumerate(traced.documents)}
    document = np.array([index[d] for d in done.document.tolist()], np.int64)
    tally = _tally(done, document, traced, point.plan)
    mask = traced.in_split("test")
    counts = traced.counts[mask]
    row = outcome_columns(tally.quality[:, mask], counts, tally, traced.metric)
    row["readouts"] = int(done.exit_step.sum()) if point.plan.needs_logits else len(done.exit_step)
    row["flops_per_token"] = (tally.step_flops + traced.base_flops(point.plan.needs_logits, "test")) / counts.sum()
    row["quality_full_depth"] = traced.uniform[traced.mean - 1, mask].sum() / counts.sum()
    identity = {"policy": point.plan.recipe.name, "threshold": point.threshold, "split": "test", "evidence": "executed"}
    recipe = point.plan.recipe
    told = {"kv_mode": kv_mode, "prefill": prefill, "hits": recipe.hits, "min_steps": recipe.min_steps, "role": "grid"}
    row = row.assign(**identity, **told, status="ok", error="", fingerprint=tally.fingerprint.astype(str))
    by_document = pd.DataFrame(
        {
            **identity,
            "document": np.array(traced.documents)[mask],
            "n_tokens": counts,
            "quality_sum": tally.quality[0, mask],
            "depth_sum": tally.depth[0, mask],
        }
    )
    return row, by_document


def _tally(done: Executed, document: np.ndarray, traced: TracedUnit, plan: PolicyPlan) -> Tally:
    correct = traced.metric is Metric.ACCURACY
    value = done.correct.astype(np.float64) if correct else done.loss / np.log(2)
    fixed, per_context = traced.watched_step(plan.needs_logits, plan.signal_flops)
    flops = done.exit_step * (fixed + per_context * (done.position + 1.0))
    documents = len(traced.documents)
    return Tally(
        quality=np.bincount(document, value, minlength=documents)[None],
        depth=np.bincount(document, done.exit_step, minlength=documents).astype(np.int64)[None],
        histogram=np.bincount(done.exit_step - 1, minlength=traced.steps)[None],
        halted=np.array([(done.outcome == Outcome.HALTED).sum()]),
        never=np.array([done.never_fired.sum()]),
        nonfinite=np.array([(done.outcome == Outcome.NONFINITE).sum()]),
        step_flops=np.array([flops.sum()]),
        fingerprint=row_tokens(np.arange(len(value)), traced.steps)[np.arange(len(value)), done.exit_step - 1].sum(
            keepdims=True
        ),
    )


def act_out(
    run: RunDirectory, plan: Plan, job: Job, unit: Unit, model: RecurrentModel, traced: TracedUnit, rows: "pd.DataFrame"
) -> list[tuple["pd.DataFrame", "pd.DataFrame"]]:
    """Executes the chosen points of a unit on its test documents, keeping what is there already."""
    import pandas as pd

    found = []
    sequences = [s for d in unit.documents[unit.calibration() :] for s in unit.draw(job.benchmark.sequences(d))]
    for number, point in enumerate(choose_points(rows, unit.plans)):
        folder = run.part("cells", unit.key, f"executed-{number}")
        if not (folder / "row.parquet").exists():
            try:
                row, documents = execute_point(
                    model, sequences, point, traced,
                    max_steps=unit.max_steps, seed=unit.seed, kv_mode=plan.config.kv_mode, prefill=plan.config.prefill,
                )  # fmt: skip
            except Exception as error:  # one failing point must never kill a sweep: its row says what happened
                run.log("execution_failed", unit=unit.key, point=point.key, error=traceback.format_exc())
                blank = blank_row(point.plan.recipe.name, "failed", f"{type(error).__name__}: {error}")
                found.append((pd.DataFrame([blank | {"threshold": point.threshold, "evidence": "executed"}]), pd.DataFrame()))
                continue
            write_frame(folder / "documents.parquet", documents)
            write_frame(folder / "row.parquet", row)
        found.append((pd.read_parquet(folder / "row.parquet"), pd.read_parquet(folder / "documents.parquet")))
    return found


def measure_points(
    run: RunDirectory, plan: Plan, job: Job, unit: Unit, model: RecurrentModel, rows: "pd.DataFrame"
) -> "pd.DataFrame":
    """Times the chosen points of a unit at the sweep's one shape, keeping what is there already."""
    import pandas as pd

    path = run.part("cells", unit.key, "latency.parquet")
    if not path.exists():
        wanted = plan.config.latency
        sequences = [s for d in unit.documents[unit.calibration() :] for s in unit.draw(job.benchmark.sequences(d))]
        length = min(wanted.length, max(len(s.tokens) for s in sequences))
        build = prefill(
            model,
            fixed_length(sequences, wanted.batch_rows, length),
            max_steps=unit.max_steps,
            kv_mode=plan.config.kv_mode,
            seed=unit.seed,
        )
        try:
            frame = time_points(
                build, choose_points(rows, unit.plans), Shape(plan.device, wanted.batch_rows, "eager", "prefill", length),
                max_steps=unit.max_steps, trained=unit.mean_recurrence, rules=wanted.protocol(len(plan.jobs)),
                seed=unit.seed, clock=clock_for(plan.device),
            )  # fmt: skip
        except Exception as error:  # seconds are an extra: without them the sweep still stands
            run.log("timing_failed", unit=unit.key, error=traceback.format_exc())
            blank = {"policy": "", "threshold": np.nan, "status": "failed", "error": f"{type(error).__name__}: {error}"}
            return pd.DataFrame([blank | {"model": unit.model_name, "benchmark": unit.benchmark_name, "seed": unit.seed}])
        for column, value in (("seed", unit.seed), ("benchmark", unit.benchmark_name), ("model", unit.model_name)):
            frame.insert(0, column, value)
        write_frame(path, frame)
    return pd.read_parquet(path)
