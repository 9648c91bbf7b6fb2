"""From the finished cells of a unit to the frames of a run: roles, fronts, details of the selected points, columns."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench.analysis.pareto import mark_fronts
from halting_bench.analysis.selection import iso_rows, mark_iso
from halting_bench.architectures.base import RecurrentModel
from halting_bench.details import (
    Selected,
    convergence_frame,
    decile_edges,
    document_rows,
    histogram_frame,
    subset_families,
    subset_rows,
)
from halting_bench.engine.controls import fixed_exits, oracle_exits, saturation_exits
from halting_bench.engine.points import ExitSource, TracedUnit
from halting_bench.engine.replay import running_extremum, signed_threshold, tally_exits, tally_thresholds
from halting_bench.executed_sweep import Setting, executed_cells
from halting_bench.jobs import Job, Plan
from halting_bench.named import is_named
from halting_bench.plan import PolicyPlan
from halting_bench.records import POINT_COLUMNS
from halting_bench.sample_text import text_frame
from halting_bench.store import RunDirectory
from halting_bench.unit import Advance, Unit, keep_cells, read_curves

if TYPE_CHECKING:
    import pandas as pd


def unit_rows(unit: Unit, job: Job, cells: list["pd.DataFrame"]) -> "pd.DataFrame":
    """The replayed rows of one unit's cells, with roles, fronts and which of them are distinct."""
    import pandas as pd

    metric = job.benchmark.metric
    rows = pd.concat(cells, ignore_index=True)
    mark_iso(rows, metric)
    rows = rows.assign(subset="all", evidence="replayed", kv_mode="full", prefill="adaptive", **_identity(unit), **_metric(job))
    order = rows.assign(rule=rows["role"] != "control").sort_values(["rule", "policy", "threshold"], kind="stable")
    rows["distinct"] = (rows["status"] == "ok") & ~order.duplicated(["split", "fingerprint"])  # whatever the recipes' order
    rows["on_front"] = mark_fronts(rows)
    return rows


def unit_frames(
    run: RunDirectory,
    plan: Plan,
    job: Job,
    unit: Unit,
    traced: TracedUnit,
    chooser: TracedUnit | None,
    rows: "pd.DataFrame",
    executed: Iterable[tuple["pd.DataFrame", "pd.DataFrame"]],
) -> dict[str, "pd.DataFrame"]:
    """All frames of one unit: points, per_document, exits, iso, convergence, curves, texts.

    Args:
        rows: see `unit_rows`.
        executed: (row, by document) of every point that was acted out.
    """
    frames = _details(plan, job, unit, traced, chooser, rows, list(executed))
    frames["iso"] = iso_rows(rows, job.benchmark.metric, unit.mean_recurrence)
    frames["convergence"] = convergence_frame(traced)
    frames["curves"] = _curves(run, unit)
    text = text_frame(job.benchmark, unit, traced, rows)
    if len(text):
        frames["texts"] = text
    for frame in frames.values():
        for column, value in reversed(_identity(unit).items()):
            if column not in frame:
                frame.insert(0, column, value)
    return frames


def executed_frames(
    run: RunDirectory, plan: Plan, job: Job, unit: Unit, model: RecurrentModel, advance: Advance
) -> dict[str, "pd.DataFrame"]:
    """The frames of a unit whose every point is executed: several loops, or an encoder. There is no oracle."""
    import pandas as pd

    setting = Setting(unit.max_steps, unit.calibration(), unit.seed, plan.config.kv_mode)
    cells = executed_cells(model, job.benchmark, list(unit.documents), unit.plans, setting, draw=unit.draw)
    rows = pd.concat(keep_cells(run, unit, cells, advance), ignore_index=True)
    rows = rows.assign(evidence="executed", **_identity(unit), **_metric(job))
    whole = rows[rows["subset"].isna() | (rows["subset"] == "all")].assign(subset="all")
    mark_iso(whole, job.benchmark.metric)
    whole["distinct"] = (whole["status"] == "ok") & ~whole.duplicated(["split", "fingerprint"])
    points = pd.concat([whole, rows[rows["subset"].notna() & (rows["subset"] != "all")]], ignore_index=True)
    points["on_front"] = mark_fronts(points)
    frames = {
        "points": points.assign(**_constants(plan, job, unit)),
        "iso": iso_rows(whole, job.benchmark.metric, unit.mean_recurrence).assign(**_identity(unit)),
    }
    return frames


def _constants(plan: Plan, job: Job, unit: Unit) -> dict[str, Any]:
    return {
        "run_id": plan.run_id, "model_hash": job.model_hash, "scope": "token", "max_steps": unit.max_steps,
        "dtype": plan.config.dtype,
    }  # fmt: skip


def _identity(unit: Unit) -> dict[str, Any]:
    return {"model": unit.model_name, "benchmark": unit.benchmark_name, "seed": unit.seed}


def _metric(job: Job) -> dict[str, Any]:
    return {"metric": job.benchmark.metric.value, "higher_is_better": job.benchmark.metric.higher_is_better}


def _curves(run: RunDirectory, unit: Unit) -> "pd.DataFrame":
    import pandas as pd

    found = [
        pd.DataFrame({"policy": policy.recipe.name, "split": split, **arrays})
        for policy in unit.plans
        for split, arrays in read_curves(run, unit, policy.recipe.name).items()
    ]
    columns = ["policy", "split", "threshold", "mean_depth", "quality"]
    return pd.concat(found, ignore_index=True)[columns] if found else pd.DataFrame(columns=columns)


def _selected(unit: Unit, traced: TracedUnit, chooser: TracedUnit | None, rows: "pd.DataFrame") -> Iterable[Selected]:
    """The points whose details are kept, policy by policy."""
    known = rows[(rows["status"] == "ok") & ~rows["policy"].str.startswith("random@")]
    named = [
        is_named(unit.named, policy, threshold) for policy, threshold in zip(known["policy"], known["threshold"], strict=True)
    ]
    keep = known[
        np.array(named, bool)
        | known["policy"].isin(["fixed", "oracle-loss", "oracle-saturation"])
        | (known["role"] == "iso")
        | (known["on_front"] & (known["split"] == "calibration"))
    ]
    plans = {plan.recipe.name: plan for plan in unit.plans}
    latent = traced.watched_step(False, 0.0)
    documents = len(unit.documents)
    for policy, group in keep.groupby("policy", sort=False):
        thresholds = group["threshold"].drop_duplicates().to_numpy()
        name = str(policy)
        if name == "fixed":
            yield Selected(
                name, thresholds, _by_exits(fixed_exits(unit.max_steps), thresholds.astype(int) - 1, documents), latent
            )
        elif name == "oracle-loss":
            every = known.loc[(known["policy"] == name) & (known["split"] == "test"), "threshold"].to_numpy()
            yield Selected(
                name, thresholds, _by_exits(oracle_exits(chooser), np.searchsorted(every, thresholds), documents), latent
            )
        elif name == "oracle-saturation":
            yield Selected(name, thresholds, _by_exits(saturation_exits, np.array([0]), documents), latent)
        else:
            plan = plans[name]
            step = traced.watched_step(plan.needs_logits, plan.signal_flops)
            if plan.rule is None:
                source = plan.exits(thresholds.tolist())
                yield Selected(name, thresholds, _by_exits(source, np.arange(len(thresholds)), documents), step)
            else:
                yield _by_threshold(plan, thresholds, traced, documents, step)


def _once_a_shard(compute: ExitSource) -> ExitSource:
    """The same answers; several questions about one shard, as for its levels and classes, compute them once."""
    held: dict[int, np.ndarray] = {}

    def answer(number: int, shard: Any) -> np.ndarray:
        if number not in held:
            held.clear()
            held[number] = compute(number, shard)
        return held[number]

    return answer


def _by_exits(source: ExitSource, which: np.ndarray, documents: int) -> Any:
    exits = _once_a_shard(lambda number, shard: source(number, shard)[which])

    def tally(number: int, shard: Any, rows: Any, mask: np.ndarray) -> Any:
        return tally_exits(exits(number, shard)[:, mask], rows.take(mask), documents)

    return tally


def _by_threshold(
    plan: PolicyPlan, thresholds: np.ndarray, traced: TracedUnit, documents: int, step: tuple[float, float]
) -> Selected:
    rule = plan.rule
    if rule is None:
        raise ValueError("a rule is needed")
    bounds = signed_threshold(thresholds, rule, traced.dtype)
    order = np.argsort(bounds)

    extremum = _once_a_shard(lambda _, shard: running_extremum(shard[f"score/{rule.signal}"], rule))

    def tally(number: int, shard: Any, rows: Any, mask: np.ndarray) -> Any:
        return tally_thresholds(extremum(number, shard)[mask], bounds[order], rows.take(mask), documents)

    return Selected(plan.recipe.name, thresholds[order], tally, step)


def _details(
    plan: Plan,
    job: Job,
    unit: Unit,
    traced: TracedUnit,
    chooser: TracedUnit | None,
    rows: "pd.DataFrame",
    executed: list[tuple["pd.DataFrame", "pd.DataFrame"]],
) -> dict[str, "pd.DataFrame"]:
    """Points (with subset and executed rows), per-document figures and exit histograms of one unit."""
    import pandas as pd

    told = rows.drop_duplicates(["policy", "threshold"]).set_index(["policy", "threshold"])
    subsets, documents, exits = _selected_details(job, traced, _selected(unit, traced, chooser, rows))
    inherited = ["params", "hits", "min_steps", "role", "status", "error", "evidence", "kv_mode", "prefill"]
    subsets = subsets.assign(split="test", **_metric(job)).join(told[inherited], on=["policy", "threshold"])
    full = subsets[(subsets["policy"] == "fixed") & (subsets["threshold"] == unit.mean_recurrence)]
    subsets["quality_full_depth"] = subsets["subset"].map(full.set_index("subset")["quality"])
    dear = {p.recipe.name for p in unit.plans if p.needs_logits}
    subsets["readouts"] = subsets["core_steps"].where(subsets["policy"].isin(dear), subsets["n_tokens"])
    acted = [row.assign(subset="all", **_metric(job)).join(told["params"], on=["policy", "threshold"]) for row, _ in executed]
    extra = pd.concat([subsets, *acted], ignore_index=True).assign(**_identity(unit), distinct=False)
    extra["on_front"] = mark_fronts(extra)
    points = pd.concat([rows, extra], ignore_index=True).assign(**_constants(plan, job, unit))
    points["depth_per_loop"] = points["mean_depth"].map(lambda depth: f"[{depth:.6g}]" if depth == depth else "")
    documents = pd.concat([documents.assign(evidence="replayed"), *(frame for _, frame in executed)], ignore_index=True)
    return {
        "points": points,
        "per_document": documents.join(told["params"], on=["policy", "threshold"]),
        "exits": exits.join(told["role"], on=["policy", "threshold"]),
    }


def _selected_details(
    job: Job, traced: TracedUnit, chosen: Iterable[Selected]
) -> tuple["pd.DataFrame", "pd.DataFrame", "pd.DataFrame"]:
    """Subset rows, rows by document and exit histograms of the selected points."""
    import pandas as pd

    families = subset_families(job.benchmark.subset_names)
    edges = decile_edges(traced)
    subsets, documents, exits = [], [], []
    for selected in chosen:
        frame, histogram = document_rows(traced, selected)
        documents.append(frame)
        exits.append(histogram_frame(selected.policy, selected.thresholds, "all", histogram))
        for subset, columns, counts in subset_rows(traced, selected, families, edges):
            subsets.append(columns.assign(subset=subset))
            exits.append(histogram_frame(selected.policy, selected.thresholds, subset, counts))
    return (
        pd.concat(subsets, ignore_index=True),
        pd.concat(documents, ignore_index=True),
        pd.concat(exits, ignore_index=True),
    )


def typed_points(points: "pd.DataFrame") -> "pd.DataFrame":
    """Exactly the columns of a record, in order and of their types; missing counts are 0 where a cell has no figures."""
    points = points.reindex(columns=list(POINT_COLUMNS))
    for name, kind in POINT_COLUMNS.items():
        if kind == "string":
            points[name] = points[name].fillna("").astype("string")
        elif kind == "bool":
            points[name] = points[name].fillna(False).astype(bool)
        elif kind == "int64":
            points[name] = points[name].fillna(0).astype("int64")
        else:
            points[name] = points[name].astype("float64")
    return points
