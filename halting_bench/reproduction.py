"""The measurements behind REPRODUCTION.md: what three papers claim, at our scale.

    python -m halting_bench.reproduction self --out results/reference

Each part writes one JSON document: figures with 95 % intervals over documents. Shapes: N scored rows, R steps, M documents.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from halting_bench import catalog
from halting_bench.analysis.statistics import mean_interval, paired_difference
from halting_bench.benchmarks.base import Benchmark
from halting_bench.diagnosis import diagnose_source
from halting_bench.engine.multi_loop import GivenDepth, execute_stacked, scored_positions
from halting_bench.engine.replay import Rule, exits_at, running_extremum
from halting_bench.engine.trace import TracePlan, trace
from halting_bench.executed_sweep import Setting, executed_cells
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.halting.routers import LABELS
from halting_bench.plan import build_policy, plan_policy
from halting_bench.records import Metric
from halting_bench.sources import find_model_source
from halting_bench.training.router_run import train_router
from halting_bench.training.routers import RouterRecipe

SELF_DOCUMENTS, SELF_STEPS, SELF_EPS = 96, 32, (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3)
HARD = 5
"""Depths from which a node counts as hard."""

TWO_SCALE_RULES = ("acceleration", "step-norm", "step-norm-change", "kl")
TWO_SCALE = {
    "two-scale-tiny": ("shell", 64, 4),
    "two-scale-tiny-gate": ("shell", 64, 4),
    "two-scale-tiny-text": ("docs", 24, 1),
}
"""Model -> benchmark, documents, sequences of each."""
TIMES = 3
FIXED_POINT_DOCUMENTS = 32
FIXED_POINT = {
    "shell": ("huginn-tiny", "level", 4, 96),
    "pancake": ("huginn-tiny", "level", 4, 96),
    "docs": ("huginn-tiny-text", "class", 1, 40),
}
"""Benchmark -> model, its subsets, sequences of a document, documents for the routers."""
ROUTERS = (*(("linear", label) for label in LABELS), ("mlp", "saturated"))


def self_transformer() -> dict[str, Any]:
    """Fixed point against one evaluation: accuracy, iterations by difficulty, and the sweep over eps; two tasks."""
    return _roots() | {"expressions": _expressions()}


def _expressions() -> dict[str, Any]:
    """Nested expressions: the fixed point against the control trained for one iteration."""
    benchmark = catalog.find_benchmark("expressions")
    sequences = [s for document in benchmark.sample(SELF_DOCUMENTS, 0) for s in benchmark.sequences(document)]
    ran = {}
    for name in ("self-expressions", "self-expressions-once"):
        model = find_model_source(name).load()
        depth = np.full((1, 1, len(model.spec.loops)), float(model.spec.mean_recurrence))
        ran[name] = execute_stacked(model, sequences, GivenDepth(), depth, max_steps=model.spec.mean_recurrence)
    fixed, once = ran.values()
    _, document = np.unique(fixed.document, return_inverse=True)
    own, control = fixed.correct[0].astype(float), once.correct[0].astype(float)
    level = np.concatenate([s.codes["level"] for s in sequences])[scored_positions(sequences)]
    found = {}
    for code, name in enumerate(("all", *benchmark.subset_names["level"]), -1):
        rows = (level == code) | (code < 0)
        count = np.bincount(document[rows], minlength=document.max() + 1)
        both = [np.bincount(document[rows], values[rows], minlength=len(count)) for values in (own, control)]
        delta, low, high = paired_difference(both[0], both[1], count)
        accuracy = {"own": float(own[rows].mean()), "other": float(control[rows].mean())}
        found[name] = {"gain": delta, "low": low, "high": high} | accuracy
    return {"depth": int(fixed.steps[0, 0, 0]), "against_trained_for_once": found}


def _roots() -> dict[str, Any]:
    benchmark = catalog.find_benchmark("roots")
    fixed, once = (_traced(name, benchmark, steps) for name, steps in (("self-tiny", SELF_STEPS), ("self-tiny-once", 1)))
    correct, difficulty = fixed["correct"].astype(float), fixed["code/level"]
    _, document = np.unique(fixed["document"], return_inverse=True)
    hard = difficulty >= HARD - 1

    def gain(other: np.ndarray, rows: np.ndarray) -> dict[str, float]:
        own, second = (np.bincount(document[rows], values[rows], minlength=document.max() + 1) for values in (trained, other))
        delta, low, high = paired_difference(own, second, np.bincount(document[rows], minlength=document.max() + 1))
        return {"gain": delta, "low": low, "high": high, "own": float(trained[rows].mean()), "other": float(other[rows].mean())}

    depth = find_model_source("self-tiny").load().spec.mean_recurrence
    trained, control = correct[:, depth - 1], once["correct"][:, 0].astype(float)
    residual, everyone = fixed["score/latent-diff"], np.ones(len(correct), bool)
    below = exits_at(running_extremum(residual, Rule("latent-diff", "below")), 1e-3)
    settled = below <= SELF_STEPS
    names = benchmark.subset_names["level"]
    levels = {}
    for code in np.unique(difficulty).tolist():
        rows = difficulty == code
        ten = exits_at(running_extremum(residual[rows], Rule("latent-diff", "below")), 0.1)
        levels[names[code]] = {
            "accuracy_by_iterations": {str(k): float(correct[rows, k - 1].mean()) for k in (1, 2, 3, 4, 6, 8, 12, 16, 32)},
            "once": float(control[rows].mean()),
            "iterations_to_0.1": float(ten.mean()),
            "iterations_to_1e-3": float(below[rows & settled].mean()) if (rows & settled).any() else None,
        }
    return {
        "depth": depth,
        "against_itself_once": {"all": gain(correct[:, 0], everyone), "hard": gain(correct[:, 0], hard)},
        "against_trained_for_once": {"all": gain(control, everyone), "hard": gain(control, hard)},
        "levels": levels,
        "settled_to_1e-3": float(settled.mean()),
        "spearman_iterations_difficulty": _spearman(below[settled], difficulty[settled]),
        "residual_median": np.median(residual, axis=0).tolist(),
        "eps": {str(eps): _eps(fixed, eps) for eps in SELF_EPS},
    }


def _traced(name: str, benchmark: Benchmark, steps: int) -> dict[str, np.ndarray]:
    sequences = [s for document in benchmark.sample(SELF_DOCUMENTS, 0) for s in benchmark.sequences(document)]
    return trace(find_model_source(name).load(), sequences, TracePlan(("latent-diff", "step-norm"), steps, 0))


def _eps(shard: dict[str, np.ndarray], eps: float) -> dict[str, float]:
    """Each token stopping by itself, and each whole sequence by its Frobenius norm (exact: all positions share a depth)."""
    rows, (_, sequence) = np.arange(len(shard["correct"])), np.unique(shard["sequence"], return_inverse=True)
    step, relative = shard["score/step-norm"].astype(float), shard["score/latent-diff"].astype(float)
    size = np.where(relative > 0, step / np.where(relative > 0, relative, 1.0), 0.0)
    moved, length = (np.stack([np.bincount(sequence, np.square(by_row)) for by_row in value.T], 1) for value in (step, size))
    both = {"token": relative, "sequence": np.sqrt(moved / length)[sequence]}
    found = {}
    for name, residual in both.items():
        exits = exits_at(running_extremum(residual, Rule(name, "below")), eps)
        found[f"{name}_never"] = float((exits > SELF_STEPS).mean())
        exits = np.minimum(exits, SELF_STEPS)
        found[f"{name}_iterations"] = float(exits.mean())
        found[f"{name}_accuracy"] = float(shard["correct"][rows, exits - 1].mean())
    return found


def _spearman(first: np.ndarray, second: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(first, second).statistic)


def two_scale() -> dict[str, Any]:
    """Drift-to-loop ratios and the paper's exit rules, executed and timed, on the two-scale models."""
    return {name: _two_scale(name, *asked) for name, asked in TWO_SCALE.items()}


def _two_scale(name: str, task: str, count: int, each: int) -> dict[str, Any]:
    import pandas as pd

    source = find_model_source(name)
    model = source.load()
    spec, benchmark = model.spec, source.benchmark(task, model.spec)
    documents = benchmark.sample(count, 0)
    setting = Setting(max_steps=2 * spec.mean_recurrence, calibration=count // 2)
    plans = tuple(plan_policy(catalog.find_policy(rule), spec, setting.max_steps) for rule in TWO_SCALE_RULES)
    cells = executed_cells(model, benchmark, documents, plans, setting, draw=lambda sequences: sequences[:each])
    rows = pd.concat([make() for _, make in cells], ignore_index=True)
    rows = rows[(rows["subset"] == "all") & (rows["status"] == "ok")]
    shown = rows[rows["split"] == "test"]
    tested = [s for document in documents[setting.calibration :] for s in benchmark.sequences(document)[:each]]

    def timed(policy: HaltingPolicy, row: Any) -> dict[str, Any]:
        own = json.loads(row["params"]).get("thresholds", [row["threshold"]] * len(spec.loops))
        point = np.array(own, float)[None, None]
        seconds = _seconds(lambda: execute_stacked(model, tested, policy, point, max_steps=setting.max_steps))
        return _figures(row) | {"thresholds": own, "ms_per_token": 1e3 * seconds / sum(len(s.tokens) for s in tested)}

    points = [
        timed(build_policy(plan.recipe, float("nan")), row)
        for plan in plans
        for _, row in shown[shown["policy"] == plan.recipe.name].iterrows()
    ]
    found = diagnose_source(source, task, documents=16)
    return {
        "uniform": [timed(GivenDepth(), row) for _, row in shown[shown["policy"] == "fixed"].iterrows()],
        "points": points,
        "random": [_figures(row) for _, row in shown[shown["policy"].str.startswith("random@")].iterrows()],
        "equal_quality": {rule: _iso(rows, rule, benchmark.metric) for rule in ("fixed", *TWO_SCALE_RULES)},
        "diagnosis": found,
    }


def _figures(row: Any) -> dict[str, Any]:
    names = ("policy", "threshold", "mean_depth", "quality", "quality_lo", "quality_hi", "delta_uniform", "delta_uniform_lo")
    return {name: row[name] for name in (*names, "delta_uniform_hi", "depth_per_loop", "never_fired_fraction")}


def _iso(rows: Any, rule: str, metric: Metric) -> dict[str, Any] | None:
    """The shallowest point that keeps full-depth quality on the calibration documents, with its test figures."""
    known = rows[rows["policy"] == rule]
    lost = (known["quality_full_depth"] - known["quality"]) * np.where(metric.higher_is_better, 1.0, -1.0)
    chosen = known[(known["split"] == "calibration") & (lost <= metric.tolerance)]
    if chosen.empty:
        return None
    best = chosen.sort_values("mean_depth").iloc[0]
    tested = known[(known["split"] == "test") & (known["threshold"] == best["threshold"]) & (known["params"] == best["params"])]
    return _figures(tested.iloc[0]) | {"full_depth": float(tested.iloc[0]["quality_full_depth"])}


def _seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one thread, which other work on the machine changes little: the median of a few runs, one to warm up."""
    import torch

    torch.set_num_threads(1)
    work()
    found = []
    for _ in range(TIMES):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
    return float(np.median(found))


def fixed_point() -> dict[str, Any]:
    """Per-token fixed points: convergence, loss to 4x the trained depth, equal-quality depths, routers; tasks and text."""
    return {name: _fixed_point(name, *asked) for name, asked in FIXED_POINT.items()}


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
    recipes = [RouterRecipe(kind, label, batch=1024) for kind, label in ROUTERS]
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
        "moving_at_trained_depth": float((shard["score/kl"][:, mean - 1] >= 1e-3).mean()),
        "equal_quality": train_router(source, name, recipes, None, documents=router_documents, max_steps=2 * mean),
    }


def _by_step(values: np.ndarray, share: float) -> list[float | None]:
    """A quantile of each step's defined scores."""
    return [float(np.quantile(c[np.isfinite(c)], share)) if np.isfinite(c).any() else None for c in values.T]


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "self": self_transformer,
    "two-scale": two_scale,
    "fixed-point": fixed_point,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures one paper's claims and writes them to a JSON file.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("results/reference"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    target = given.out / f"reproduction-{given.part}.json"
    target.write_text(json.dumps(PARTS[given.part](), indent=1) + "\n")
    print(target)
