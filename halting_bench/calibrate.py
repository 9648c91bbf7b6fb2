"""Calibrates the policies of a run: for each the fastest threshold that keeps a promised quality.

The documents of a run's calibration split do two jobs, and each document only one: the first quarter (the pilot) places
the thresholds and sets the order in which they are tested, the rest test them. The test split then shows what the chosen
threshold does. Acted-out points were chosen on the whole calibration split, so they are tested on the test split.

Shapes: G thresholds, M documents.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench.analysis.calibration import BOUND, Promise, fastest_certified
from halting_bench.analysis.statistics import mean_of_documents
from halting_bench.catalog import PolicyRecipe, RuleSpec, parse
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

_COUNTED = (0.0, 0.0)  # FLOPs are the points table's business


@dataclass(frozen=True)
class Candidates:
    """The thresholds of one policy that may be chosen. thresholds: [G]; quality, depth: sums by document, [G, M]."""

    policy: str
    thresholds: np.ndarray
    quality: np.ndarray
    depth: np.ndarray


@dataclass(frozen=True)
class Documents:
    """What losses are measured against, and which documents do what. Arrays [M]."""

    counts: np.ndarray
    full: np.ndarray  # summed outcome at full depth
    sign: int
    pilot: np.ndarray  # bool
    tested: np.ndarray  # bool
    shown: np.ndarray  # bool: the test split

    def loss(self, quality: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Quality lost against full depth, a mean over each document's tokens, [G, M']."""
        return self.sign * (self.full[which] - quality[:, which]) / self.counts[which]

    def depth(self, depth: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Mean depth over the tokens of some documents, [G]."""
        return depth[:, which].sum(axis=1) / self.counts[which].sum()


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
        UserError: a promise that means nothing, an unknown policy, or a run without its trace.
    """
    import pandas as pd

    recipes = {value["name"]: parse(PolicyRecipe, value, f"{run.path}/manifest.json") for value in run.manifest["policies"]}
    for name in policies or ():
        if name not in recipes and name != "fixed":
            raise unknown_name("policy in this run", name, ["fixed", *recipes])
    ok = run.points[run.points["status"] == "ok"]
    rows: list[dict[str, Any]] = []
    for (model, benchmark, seed), points in ok.groupby(["model", "benchmark", "seed"], sort=False):
        metric = _metric(str(points["metric"].iloc[0]), str(benchmark))
        promise = Promise(max_loss, confidence, BOUND[metric] if bound is None else bound)
        present = [name for name in ("fixed", *recipes) if name in set(points["policy"]) and name in (policies or (name,))]
        own = promise.shared(len(present)) if best_of_all else promise
        unit = traced_unit(run, str(model), str(benchmark), int(seed), metric)
        documents = _documents(unit)
        executed = _of_unit(run.per_document, str(model), str(benchmark), int(seed))
        executed = executed[executed["evidence"] == "executed"]
        for name in present:
            found = _certify(_candidates(unit, recipes.get(name), documents), documents, own)
            acted = _certify_executed(
                points[points["policy"] == name], executed[executed["policy"] == name], unit, documents, own
            )
            rows += [
                {"model": model, "benchmark": benchmark, "seed": seed, "metric": metric.value, "policy": name, **row}
                | {"max_loss": max_loss, "confidence": confidence, "own_confidence": own.confidence, "bound": own.bound}
                for row in (found, acted)
                if row
            ]
    return pd.DataFrame(rows)


def _metric(name: str, benchmark: str) -> Metric:
    if name not in {metric.value for metric in Metric}:
        known = " or ".join(metric.value for metric in Metric)
        raise UserError(f"{benchmark} is scored by {name}: only benchmarks scored token by token ({known}) can be calibrated")
    return Metric(name)


def traced_unit(run: Run, model: str, benchmark: str, seed: int, metric: Metric) -> TracedUnit:
    """The recorded pass of one unit. Raises UserError with the command that makes it, where it is gone."""
    jobs = [job for job in run.manifest["plan"]["jobs"] if job["model"] == model and job["benchmark"] == benchmark]
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
        jobs[0]["full_depth"],
    )


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
    if recipe.python:
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
        return row | _without(promise, "the rule never fires on the pilot documents")
    index, p = fastest_certified(
        documents.loss(candidates.quality, documents.tested),
        documents.loss(candidates.quality, documents.pilot),
        documents.depth(candidates.depth, documents.pilot),
        promise,
    )
    row |= {"p_value": p, "needed": promise.documents_needed()}
    if index is None:
        return row | _without(promise, _why(row["n_documents"], promise))
    row |= {"threshold": float(candidates.thresholds[index]), "status": "certified", "error": ""}
    for name, which in (("calibration", documents.tested), ("test", documents.shown)):
        loss = documents.loss(candidates.quality[index : index + 1], which)
        row[f"mean_depth_{name}"] = float(documents.depth(candidates.depth[index : index + 1], which)[0])
        row |= _losses(name, loss[0], promise)
    return row


def _losses(name: str, loss: np.ndarray, promise: Promise) -> dict[str, float]:
    mean, low, high = mean_of_documents(loss)
    clipped = float(promise.risk(loss).mean() * promise.bound) if len(loss) else float("nan")
    return {f"loss_{name}": mean, f"loss_{name}_lo": low, f"loss_{name}_hi": high, f"clipped_loss_{name}": clipped}


def _why(documents: int, promise: Promise) -> str:
    if documents < promise.documents_needed():
        needed = promise.documents_needed()
        return f"cannot certify with {documents} documents: needs at least {needed}, even if none loses anything"
    return "cannot certify: its safest threshold already loses too much"


def _without(promise: Promise, why: str) -> dict[str, Any]:
    return {"threshold": np.nan, "status": "not certified", "error": why, "needed": promise.documents_needed()}


def _certify_executed(
    points: "pd.DataFrame", executed: "pd.DataFrame", unit: TracedUnit, documents: Documents, promise: Promise
) -> dict[str, Any] | None:
    """The same for the points of a policy that were acted out; None where none was.

    Args:
        points: the policy's rows of `points`, for the calibration figures that set the order.
        executed: its rows by document.
        unit: for the order of documents.
        documents: the test split of them is tested.
        promise: what is certified.
    """
    known = points[(points["split"] == "calibration") & (points["subset"] == "all") & (points["evidence"] == "replayed")]
    known = known.drop_duplicates("threshold").set_index("threshold")
    thresholds = [threshold for threshold in executed["threshold"].unique() if threshold in known.index]
    if not thresholds:
        return None
    rows, columns = len(thresholds), len(unit.documents)
    index = np.searchsorted(np.sort(unit.documents), executed["document"])
    column = np.argsort(unit.documents)[index]
    row = executed["threshold"].map({threshold: place for place, threshold in enumerate(thresholds)})
    kept = row.notna().to_numpy()
    at = row[kept].to_numpy(int), column[kept]
    quality, depth = np.full((rows, columns), np.nan), np.zeros((rows, columns))
    quality[at], depth[at] = executed["quality_sum"][kept], executed["depth_sum"][kept]
    ordered = known.loc[thresholds]
    order_loss = documents.sign * (ordered["quality_full_depth"] - ordered["quality"]).to_numpy()[:, None]
    loss = documents.loss(quality, documents.shown)
    best, p = fastest_certified(loss, order_loss, ordered["mean_depth"].to_numpy(), promise)
    found: dict[str, Any] = {"evidence": "executed", "tested_on": "test", "n_documents": int(documents.shown.sum())}
    found |= {"p_value": p, "needed": promise.documents_needed()}
    if best is None:
        return found | _without(promise, _why(found["n_documents"], promise))
    found |= {"threshold": float(thresholds[best]), "status": "certified", "error": ""}
    found["mean_depth_test"] = float(documents.depth(depth[best : best + 1], documents.shown)[0])
    return found | _losses("test", loss[best], promise)
