"""Per-token fixed points (arXiv 2607.14427): convergence, depth by difficulty, and rules of equal quality.

Shapes: N scored rows, R steps, M documents.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from halting_bench.analysis.statistics import mean_interval
from halting_bench.engine.replay import Rule, exits_at, running_extremum
from halting_bench.engine.trace import TracePlan, trace
from halting_bench.halting.routers import HARD_LABELS, INPUTS
from halting_bench.latency import time_run
from halting_bench.latency_plan import LatencyRequest
from halting_bench.sources import find_model_source
from halting_bench.store import load_run
from halting_bench.sweep_config import SweepConfig
from halting_bench.sweeping.run import sweep
from halting_bench.training.router_run import train_router
from halting_bench.training.routers import RouterRecipe

FIXED_POINT_DOCUMENTS = 32
FIXED_POINT = {
    "shell": ("huginn-tiny", "level", 4, 96),
    "pancake": ("huginn-tiny", "level", 4, 96),
    "docs": ("huginn-tiny-text", "class", 1, 40),
}
"""Benchmark -> model, its subsets, sequences of a document, documents for the routers."""
FREE_RULES = ("kl", "latent-diff")
TIMED_ROWS = 8
ROUTERS = (
    *(("linear", label, inputs) for inputs in INPUTS for label in HARD_LABELS),
    ("mlp", "saturated", "latent"),
    *(("gate", "gain", inputs) for inputs in INPUTS),
)
"""Kind, label and inputs."""


def fixed_point() -> dict[str, Any]:
    """Per-token fixed points: convergence, loss to 4x the trained depth, equal-quality depths, routers; tasks and text."""
    return {name: _fixed_point(name, *asked) | {"seconds": seconds(asked[0], name)} for name, asked in FIXED_POINT.items()}


def seconds(model: str, benchmark: str) -> list[dict[str, Any]]:
    """The free rules at equal quality, acted out and timed beside uniform depth: scoring a text, and decoding.

    Returns:
        One row a rule and phase: `halting-bench sweep`, then `halting-bench latency` at those points.
    """
    import pandas as pd

    with TemporaryDirectory() as folder:
        config = SweepConfig(models=(model,), benchmarks=(benchmark,), policies=FREE_RULES, plots=False)
        run = sweep(config, out=Path(folder) / "run")
        chosen = load_run(run).iso
        chosen = chosen[chosen["policy"].isin((*FREE_RULES, "fixed")) & (chosen["status"] == "ok")]
        names = tuple(f"{row.policy}@{row.threshold!r}" for row in chosen.itertuples())
        timed = time_run(run, LatencyRequest(names, batch_rows=(TIMED_ROWS,), time_budget_s=120.0))
    point = ["policy", "threshold"]
    full = pd.DataFrame({"policy": "fixed", "threshold": chosen["full_depth"].unique()})
    known = timed.points[timed.points["split"] == "test"]  # a uniform depth replayed is that depth executed
    known = known[(known["evidence"] == "executed") | (known["policy"] == "fixed")]
    acted = known.loc[known["subset"] == "all", [*point, "mean_depth", "quality", "quality_lo", "quality_hi"]]
    acted = acted.drop_duplicates(point)
    rows = pd.concat((chosen[point], full)).drop_duplicates().merge(acted, on=point, how="left")
    figures = ["latency_ms_per_token", "p10", "p90", "speedup", "speedup_ideal", "realised_fraction", "noisy"]
    measured = timed.latency.loc[timed.latency["status"] == "ok", [*point, "phase", "batch_rows", *figures]]
    rows = rows.merge(measured, on=point)
    return json.loads(rows.to_json(orient="records"))  # NaN becomes null


def _fixed_point(name: str, model_name: str, family: str, each: int, router_documents: int) -> dict[str, Any]:
    source = find_model_source(model_name)
    model = source.load()
    mean, benchmark = model.spec.mean_recurrence, source.benchmark(name, model.spec)
    sequences = [s for document in benchmark.sample(FIXED_POINT_DOCUMENTS, 0) for s in benchmark.sequences(document)[:each]]
    shard = trace(model, sequences, TracePlan(("kl", "latent-diff"), 4 * mean, 0))
    _, document = np.unique(shard["document"], return_inverse=True)
    loss = np.stack([np.bincount(document, by_row) for by_row in shard["loss"].astype(float).T])
    value, low, high = mean_interval(loss, np.bincount(document), bounded=False)
    converged = exits_at(running_extremum(shard["score/kl"], Rule("kl", "below")), 1e-3)
    levels, difficulty = benchmark.subset_names[family], shard[f"code/{family}"]
    recipes = [RouterRecipe(kind, label, inputs=inputs, batch=1024) for kind, label, inputs in ROUTERS]
    return {
        "kl_median": _by_step(shard["score/kl"], 0.5),
        "kl_p90": _by_step(shard["score/kl"], 0.9),
        "latent_diff_median": _by_step(shard["score/latent-diff"], 0.5),
        "latent_diff_p90": _by_step(shard["score/latent-diff"], 0.9),
        "loss": value.tolist(),
        "loss_lo": low.tolist(),
        "loss_hi": high.tolist(),
        "median_steps_to_kl_1e-3": {
            levels[code]: float(np.median(converged[difficulty == code])) for code in np.unique(difficulty).tolist()
        },
        "mean_steps_to_kl_1e-3": {
            levels[code]: _mean(np.minimum(converged, 4 * mean), document, difficulty == code)
            for code in np.unique(difficulty).tolist()
        },
        "moving_at_trained_depth": float((shard["score/kl"][:, mean - 1] >= 1e-3).mean()),
        "equal_quality": train_router(source, name, recipes, None, documents=router_documents, max_steps=2 * mean),
    }


def _mean(values: np.ndarray, document: np.ndarray, rows: np.ndarray) -> dict[str, float]:
    """Of some rows, with an interval over documents."""
    _, own = np.unique(document[rows], return_inverse=True)
    found = mean_interval(np.bincount(own, values[rows])[None], np.bincount(own), bounded=False)
    return dict(zip(("mean", "low", "high"), (float(value[0]) for value in found), strict=True))


def _by_step(values: np.ndarray, share: float) -> list[float | None]:
    """A quantile of each step's defined scores."""
    return [float(np.quantile(c[np.isfinite(c)], share)) if np.isfinite(c).any() else None for c in values.T]
