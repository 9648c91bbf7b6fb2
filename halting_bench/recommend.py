"""Recommends one policy at one threshold: the cheapest certified one that a budget allows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from halting_bench.calibrate import calibrate
from halting_bench.catalog import PolicyRecipe, parse
from halting_bench.deployment import Certificate, Deployment, huginn_arguments, ouro_arguments
from halting_bench.errors import UserError, unknown_name
from halting_bench.store import Run

if TYPE_CHECKING:
    import pandas as pd

_LIMITS = {"mean_depth": "core steps a token", "flops": "FLOPs a token", "ms": "ms a token"}


@dataclass(frozen=True)
class Budget:
    """What a token may cost; None: any. The limit that is given is also what is made least, mean depth by default."""

    mean_depth: float | None = None
    flops: float | None = None
    ms: float | None = None

    def costs(self) -> list[str]:
        """The quantities with a limit, the first of which is made least."""
        return [name for name in _LIMITS if getattr(self, name) is not None] or ["mean_depth"]


def recommend(
    run: Run,
    max_loss: float,
    confidence: float,
    *,
    budget: Budget | None = None,
    bound: float | None = None,
    model: str | None = None,
    benchmark: str | None = None,
) -> Deployment:
    """The best certified policy of one (model, benchmark), by calibration documents.

    The confidence is split over the policies compared, so it holds for the one that is picked.

    Raises:
        UserError: nothing is certified, nothing certified fits the budget, the run was not timed but ms are asked for, or
            the run has several models or benchmarks and none was named.
    """
    model = _the_one(run, "model", model)
    benchmark = _the_one(run, "benchmark", benchmark)
    budget = budget or Budget()
    frame = calibrate(_part(run, model, benchmark), max_loss, confidence, bound=bound, best_of_all=True)
    replayed = frame[(frame["evidence"] == "replayed") & (frame["seed"] == frame["seed"].min())]
    good = replayed[replayed["status"] == "certified"]
    if good.empty:
        raise UserError(f"no policy of {model} on {benchmark} can be recommended: {replayed['error'].iloc[0]}")
    good = good.assign(**{name: [_cost(run, row, name) for row in good.to_dict("records")] for name in budget.costs()})
    first = budget.costs()[0]
    fitting = good
    for name in budget.costs():
        limit = getattr(budget, name)
        if limit is not None:
            fitting = fitting[fitting[name] <= limit]
    if fitting.empty:
        best = good.sort_values(first, kind="stable").iloc[0]
        raise UserError(
            f"no certified policy fits {getattr(budget, first):g} {_LIMITS[first]}: the cheapest, {best['policy']}, takes "
            f"{best[first]:.4g}; raise the budget or --max-loss"
        )
    return _deployment(run, fitting.sort_values([first, "policy"], kind="stable").iloc[0], len(replayed))


def _the_one(run: Run, column: str, asked: str | None) -> str:
    known = run.points[column].drop_duplicates().tolist()
    if asked is not None and asked not in known:
        raise unknown_name(f"{column} in this run", asked, known)
    if asked is None and len(known) > 1:
        raise UserError(f"this run has {len(known)} {column}s: name one with --{column} ({', '.join(known)})")
    return str(asked or known[0])


def _part(run: Run, model: str, benchmark: str) -> Run:
    from dataclasses import replace

    return replace(run, points=run.points[(run.points["model"] == model) & (run.points["benchmark"] == benchmark)])


def _cost(run: Run, row: dict, name: str) -> float:
    """What a certified point costs; FLOPs and ms are read off the policy's own points, linear in mean depth."""
    depth = float(row["mean_depth_calibration"])
    if name == "mean_depth":
        return depth
    known = _costs(run, row, name)
    return float(np.interp(depth, known["mean_depth"], known[name])) if len(known) else float("inf")


def _costs(run: Run, row: dict, name: str) -> "pd.DataFrame":
    key = ["model", "benchmark", "seed", "policy"]
    points = run.points[(run.points[key] == [row[each] for each in key]).all(axis=1) & (run.points["status"] == "ok")]
    points = points[(points["subset"] == "all") & (points["evidence"] == "replayed")]
    if name == "flops":
        points = points.rename(columns={"flops_per_token": "flops"})
        return points[points["split"] == "calibration"].sort_values("mean_depth")
    if run.latency.empty:
        raise UserError(
            f"{run.path} was not timed, so --max-ms has nothing to hold: sweep without --no-latency, or give --max-depth"
        )
    timed = run.latency[run.latency["status"] == "ok"].rename(columns={"latency_ms_per_token": "ms"})
    joined = timed.merge(
        points.loc[points["split"] == "test", [*key, "threshold", "mean_depth"]], on=[*key, "threshold"], suffixes=("_", "")
    )
    return joined.groupby("mean_depth", as_index=False)["ms"].max().sort_values("mean_depth")


def _deployment(run: Run, row: "pd.Series", compared: int) -> Deployment:
    key = ["model", "benchmark", "seed"]
    points = run.points[(run.points[key] == [row[each] for each in key]).all(axis=1)].iloc[0]
    recipes = {value["name"]: value for value in run.manifest["policies"]}
    name = str(row["policy"])
    recipe = parse(PolicyRecipe, recipes[name], f"{run.path}/manifest.json") if name != "fixed" else None
    threshold, max_steps = float(row["threshold"]), int(points["max_steps"])
    certificate = Certificate(
        run_id=str(points["run_id"]),
        benchmark=str(row["benchmark"]),
        metric=str(row["metric"]),
        evidence=str(row["evidence"]),
        max_loss=float(row["max_loss"]),
        confidence=float(row["confidence"]),
        bound=float(row["bound"]),
        policies_compared=compared,
        n_documents=int(row["n_documents"]),
        mean_depth=float(row["mean_depth_test"]),
        loss=float(row["loss_test"]),
    )
    return Deployment(
        model=str(row["model"]),
        model_hash=str(points["model_hash"]),
        recipe=recipe,
        threshold=threshold,
        max_steps=max_steps,
        certificate=certificate,
        huginn=huginn_arguments(recipe, threshold, max_steps),
        ouro=ouro_arguments(recipe, threshold),
    )
