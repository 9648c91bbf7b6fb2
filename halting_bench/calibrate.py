"""Calibrates the policies of a run: for each the fastest threshold that keeps a promised quality.

The documents of a run's calibration split do two jobs, and each document only one: the first quarter (the pilot) places
the thresholds and sets the order in which they are tested, the rest test them. The test split then shows what the chosen
threshold does. Acted-out points, and all points of lm-eval tasks, were chosen on the whole calibration split, so they are
tested on the test split.

Shapes: G thresholds, M documents.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench.analysis.calibration import BOUND, Promise, fastest_certified
from halting_bench.catalog import PolicyRecipe, RuleSpec, parse
from halting_bench.certification import Documents, certify_kept, documents_of, losses, why, without
from halting_bench.engine.controls import combined_exits, fixed_exits, opaque_exits
from halting_bench.engine.curve import CurveBuilder, sample_curve
from halting_bench.engine.points import RowCost, Tallies, TracedUnit, extrema, replay_exits, replay_thresholds
from halting_bench.engine.replay import Rule, unsigned_threshold
from halting_bench.errors import UserError, unknown_name
from halting_bench.plan import folder_name, replay_combination, replay_rule, trace_shards
from halting_bench.records import Metric
from halting_bench.rerun import sweep_command
from halting_bench.store import Run

if TYPE_CHECKING:
    import pandas as pd

PILOT = 0.25
"""The share of the calibration documents that place and order thresholds."""

GRID = 128
"""Thresholds tested of each rule, evenly spaced in mean depth on the pilot."""

_TOKEN_METRICS = {metric.value for metric in Metric}
"""Metrics that are means over tokens: any threshold's loss is read off the trace. Others have the kept points only."""

_COUNTED = (0.0, 0.0)  # FLOPs are the points table's business


@dataclass(frozen=True)
class Candidates:
    """The thresholds of one policy that may be chosen. thresholds: [G]; quality, depth: sums by document, [G, M]."""

    policy: str
    thresholds: np.ndarray
    quality: np.ndarray
    depth: np.ndarray


def calibrate(
    run: Run,
    max_loss: float,
    confidence: float,
    *,
    bound: float | None = None,
    policies: Sequence[str] | None = None,
    best_of_all: bool = False,
) -> "pd.DataFrame":
    """One row a (model, benchmark, seed, policy, evidence): its fastest certified threshold, or why there is none.

    Args:
        run: with its trace.
        max_loss: of quality against full depth, in the metric's unit.
        confidence: of each row by itself.
        bound: the largest loss of a document that counts; none: `BOUND` of the metric.
        policies: which; none: every policy of the run, and uniform depth.
        best_of_all: split the confidence, so that the best row of a (model, benchmark, seed) keeps it although it was
            picked for being the best.

    Raises:
        UserError: a promise that means nothing, an unknown policy, or a run without its trace. Benchmarks whose points were
            only acted out have none and are left out; where nothing else is in the run, that is an error.
    """
    import pandas as pd

    recipes = {value["name"]: parse(PolicyRecipe, value, f"{run.path}/manifest.json") for value in run.manifest["policies"]}
    for name in policies or ():
        if name not in recipes and name != "fixed":
            raise unknown_name("policy in this run", name, ["fixed", *recipes])
    ok = run.points[run.points["status"] == "ok"]
    rows: list[dict[str, Any]] = []
    for (model, benchmark, seed), points in ok.groupby(["model", "benchmark", "seed"], sort=False):
        name, higher = str(points["metric"].iloc[0]), bool(points["higher_is_better"].iloc[0])
        if name in _TOKEN_METRICS and not (points["evidence"] == "replayed").any():
            continue
        kept = _of_unit(run.per_document, str(model), str(benchmark), int(seed))
        promise = Promise(max_loss, confidence, _bound(name, kept, str(benchmark)) if bound is None else bound)
        present = [each for each in ("fixed", *recipes) if each in set(points["policy"]) and each in (policies or (each,))]
        own = promise.shared(len(present)) if best_of_all else promise
        told = {"model": model, "benchmark": benchmark, "seed": seed, "metric": name, "higher_is_better": higher}
        told |= {"max_loss": max_loss, "confidence": confidence, "own_confidence": own.confidence, "bound": own.bound}
        unit: TracedUnit | None = None
        if name in _TOKEN_METRICS:
            unit = traced_unit(run, str(model), str(benchmark), int(seed), Metric(name))
            documents, ids = _documents(unit), np.array(unit.documents)
        else:
            documents, ids = documents_of(kept, _full_depth(run, str(model), str(benchmark)), higher)
        for policy in present:
            found: list[dict[str, Any] | None] = []
            if unit is not None:
                found.append(_certify(_candidates(unit, recipes.get(policy), documents), documents, own))
            of_policy, by_document = points[points["policy"] == policy], kept[kept["policy"] == policy]
            for evidence in ("executed",) if unit is not None else ("replayed", "executed"):
                row = certify_kept(of_policy, by_document[by_document["evidence"] == evidence], ids, documents, own)
                found.append(row and {"evidence": evidence, **row})
            rows += [{**told, "policy": policy, **row} for row in found if row]
    if not rows:
        raise UserError(
            f"{run.path} holds points acted out only, and calibration reads a trace: sweep a causal model of one loop"
        )
    return pd.DataFrame(rows)


def _bound(metric: str, kept: "pd.DataFrame", benchmark: str) -> float:
    """The largest loss of a document that counts, where the metric tells: of a task's own, when its values lie in [0, 1]."""
    if metric in _TOKEN_METRICS:
        return BOUND[Metric(metric)]
    if kept["quality_sum"].between(0, 1).all():
        return 1.0
    raise UserError(
        f"{benchmark} is scored by {metric}, whose values by document are not within [0, 1]: type --bound B, the largest loss "
        "of a document that counts; where the metric is no mean over documents, sweep a task that has one"
    )


def traced_unit(run: Run, model: str, benchmark: str, seed: int, metric: Metric) -> TracedUnit:
    """The recorded pass of one unit. Raises UserError with the command that makes it, where it is gone."""
    try:
        shards = trace_shards(run.path / "trace" / model / folder_name(benchmark) / str(seed))
    except FileNotFoundError:
        command = sweep_command(run.manifest, run.path, "--keep-trace")
        raise UserError(f"{run.path} has no trace of {model} on {benchmark}: record it again with `{command}`") from None
    first = _of_unit(run.per_document, model, benchmark, seed)
    first = first[(first["policy"] == "fixed") & (first["threshold"] == 1) & (first["evidence"] == "replayed")]
    free = (0.0, 0.0)
    return TracedUnit(
        shards,
        first["document"].tolist(),
        int((first["split"] == "calibration").sum()),
        metric,
        RowCost(free, free, free),
        _full_depth(run, model, benchmark),
    )


def _full_depth(run: Run, model: str, benchmark: str) -> int:
    jobs = [job for job in run.manifest["plan"]["jobs"] if job["model"] == model and job["benchmark"] == benchmark]
    return int(jobs[0]["full_depth"])


def _of_unit(frame: "pd.DataFrame", model: str, benchmark: str, seed: int) -> "pd.DataFrame":
    return frame[(frame["model"] == model) & (frame["benchmark"] == benchmark) & (frame["seed"] == seed)]


def _documents(unit: TracedUnit) -> Documents:
    scored = unit.counts > 0
    calibration = unit.in_split("calibration") & scored
    place = np.cumsum(calibration)
    pilot = calibration & (place <= max(1, round(PILOT * calibration.sum())))
    return Documents(
        counts=unit.counts,
        full=unit.uniform[unit.mean - 1],
        sign=1 if unit.metric.higher_is_better else -1,
        pilot=pilot,
        tested=calibration & ~pilot,
        shown=unit.in_split("test") & scored,
    )


def _candidates(unit: TracedUnit, recipe: PolicyRecipe | None, documents: Documents) -> Candidates:
    """The thresholds of a policy, placed by the pilot alone. recipe: None for uniform depth."""
    if recipe is None:
        depths = np.arange(1.0, unit.steps + 1)
        return _summed("fixed", depths, replay_exits(unit, fixed_exits(unit.steps), _COUNTED))
    if recipe.signal:
        rule = replay_rule(
            RuleSpec(signal=recipe.signal, hits=recipe.hits, min_steps=recipe.min_steps, every=recipe.every), recipe
        )
        bounds = _pilot_bounds(unit, rule, documents)
        return _summed(recipe.name, unsigned_threshold(bounds, rule), replay_thresholds(unit, rule, bounds, _COUNTED))
    thresholds = list(recipe.grid.absolute)
    if recipe.python or recipe.router:
        source = opaque_exits([f"{recipe.name}@{threshold!r}" for threshold in thresholds])
    else:
        source = combined_exits(replay_combination(recipe), thresholds)
    return _summed(recipe.name, np.array(thresholds), replay_exits(unit, source, _COUNTED))


def _summed(policy: str, thresholds: np.ndarray, tallies: Tallies) -> Candidates:
    quality = sum(tally.quality for tally in tallies.values())
    depth = sum(tally.depth for tally in tallies.values())
    return Candidates(policy, np.asarray(thresholds, np.float64), np.asarray(quality), np.asarray(depth))


def _pilot_bounds(unit: TracedUnit, rule: Rule, documents: Documents) -> np.ndarray:
    with tempfile.TemporaryDirectory() as scratch, CurveBuilder(Path(scratch)) as builder:
        for extremum, rows in extrema(unit, rule, _COUNTED):
            mask = documents.pilot[rows.document] & (rows.last_step > unit.steps)
            builder.add(extremum[mask], rows.outcome[mask])
        return np.unique(sample_curve(builder, unit.steps, GRID).bound) if builder.rows else np.empty(0, unit.dtype)


def _certify(candidates: Candidates, documents: Documents, promise: Promise) -> dict[str, Any]:
    row: dict[str, Any] = {"evidence": "replayed", "tested_on": "calibration", "n_documents": int(documents.tested.sum())}
    if not len(candidates.thresholds):
        return row | without(promise, "the rule never fires on the pilot documents")
    index, p = fastest_certified(
        documents.loss(candidates.quality, documents.tested),
        documents.loss(candidates.quality, documents.pilot),
        documents.depth(candidates.depth, documents.pilot),
        promise,
    )
    row |= {"p_value": p, "needed": promise.documents_needed()}
    if index is None:
        return row | without(promise, why(row["n_documents"], promise))
    row |= {"threshold": float(candidates.thresholds[index]), "status": "certified", "error": ""}
    for name, which in (("calibration", documents.tested), ("test", documents.shown)):
        loss = documents.loss(candidates.quality[index : index + 1], which)
        row[f"mean_depth_{name}"] = float(documents.depth(candidates.depth[index : index + 1], which)[0])
        row |= losses(name, loss[0], promise)
    return row
