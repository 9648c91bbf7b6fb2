"""SELF-Transformer (arXiv 2507.13569): an encoder's attention iterated to its fixed point, against one evaluation.

Shapes: N scored rows, R steps, M documents.
"""

from typing import Any

import numpy as np

from halting_bench import catalog
from halting_bench.analysis.statistics import paired_difference
from halting_bench.benchmarks.base import Benchmark
from halting_bench.engine.multi_loop import GivenDepth, execute_stacked, scored_positions
from halting_bench.engine.replay import Rule, exits_at, running_extremum
from halting_bench.engine.trace import TracePlan, trace
from halting_bench.halting.policies import ThresholdPolicy
from halting_bench.records import Metric
from halting_bench.sources import find_model_source

SELF_DOCUMENTS, SELF_STEPS, SELF_EPS = 96, 32, (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3)
EPS_RULES = {"token": "latent-diff-old", "sequence": "attention-fixed-point"}
HARD = 5
"""Depths from which a node counts as hard."""


def self_transformer() -> dict[str, Any]:
    """Fixed point against one evaluation: quality, iterations by difficulty, and the sweep over eps; three tasks."""
    return _roots() | {"expressions": _against("self-expressions", "expressions", "level"), "masked": masked()}


def masked() -> dict[str, Any]:
    """Hidden bytes of text: bits a byte against the control, and by iterations; iterations by length of the hidden run."""
    benchmark = catalog.find_benchmark("masked")
    shard = _traced("self-masked", benchmark, SELF_STEPS)
    bits, run = shard["loss"].astype(float) / np.log(2), shard["code/run"]
    reached = {
        eps: exits_at(running_extremum(shard["score/latent-diff"], Rule("latent-diff", "below")), eps) for eps in (0.1, 1e-3)
    }
    runs = {}
    for code, name in enumerate(("all", *benchmark.subset_names["run"]), -1):
        rows = (run == code) | (code < 0)
        settled = rows & (reached[1e-3] <= SELF_STEPS)
        runs[name] = {
            "bytes": int(rows.sum()),
            "bits_by_iterations": _by_iterations(bits[rows]),
            "iterations_to_0.1": float(reached[0.1][rows].mean()),
            "iterations_to_1e-3": float(reached[1e-3][settled].mean()) if settled.any() else None,
        }
    longer = _against("self-masked", "masked", "run", "self-masked-once-longer")
    return _against("self-masked", "masked", "run") | {
        "against_trained_for_once_longer": longer["against_trained_for_once"],
        "runs": runs,
        "settled_to_1e-3": float((reached[1e-3] <= SELF_STEPS).mean()),
        "spearman_iterations_run": _spearman(reached[0.1], run),
        "residual_median": np.median(shard["score/latent-diff"], axis=0).tolist(),
    }


def _against(model_name: str, benchmark_name: str, family: str, control_name: str = "") -> dict[str, Any]:
    """The fixed point against the control trained for one iteration, in all and by subset; a gain is for the better."""
    benchmark = catalog.find_benchmark(benchmark_name)
    sequences = [s for document in benchmark.sample(SELF_DOCUMENTS, 0) for s in benchmark.sequences(document)]
    ran = []
    for name in (model_name, control_name or f"{model_name}-once"):
        model = find_model_source(name).load()
        depth = np.full((1, 1, len(model.spec.loops)), float(model.spec.mean_recurrence))
        ran.append(execute_stacked(model, sequences, GivenDepth(), depth, max_steps=model.spec.mean_recurrence))
    exact = benchmark.metric is Metric.ACCURACY
    own, control = (done.correct[0].astype(float) if exact else done.loss[0] / np.log(2) for done in ran)
    _, document = np.unique(ran[0].document, return_inverse=True)
    codes = np.concatenate([s.codes[family] for s in sequences])[scored_positions(sequences)]
    found = {
        name: _gain(own, control, document, (codes == code) | (code < 0), benchmark.metric)
        for code, name in enumerate(("all", *benchmark.subset_names[family]), -1)
    }
    return {"depth": int(ran[0].steps[0, 0, 0]), "against_trained_for_once": found}


def _gain(own: np.ndarray, other: np.ndarray, document: np.ndarray, rows: np.ndarray, metric: Metric) -> dict[str, float]:
    """By how much `own` is better over some of the rows, paired by document.

    Args:
        own, other: [N] outcomes of the metric.
        document: [N] 0-based.
        rows: bool [N].
        metric: which of more and less is better.
    """
    count = np.bincount(document[rows], minlength=document.max() + 1)
    better, worse = (own, other) if metric.higher_is_better else (other, own)
    first, second = (np.bincount(document[rows], values[rows], minlength=len(count)) for values in (better, worse))
    delta, low, high = paired_difference(first, second, count)
    return {"gain": delta, "low": low, "high": high, "own": float(own[rows].mean()), "other": float(other[rows].mean())}


def _by_iterations(outcome: np.ndarray) -> dict[str, float]:
    """Means of [N, R] by step."""
    return {str(k): float(outcome[:, k - 1].mean()) for k in (1, 2, 3, 4, 6, 8, 12, 16, 32)}


def _roots() -> dict[str, Any]:
    benchmark = catalog.find_benchmark("roots")
    fixed, once = (_traced(name, benchmark, steps) for name, steps in (("self-tiny", SELF_STEPS), ("self-tiny-once", 1)))
    correct, difficulty = fixed["correct"].astype(float), fixed["code/level"]
    _, document = np.unique(fixed["document"], return_inverse=True)
    hard = difficulty >= HARD - 1

    depth = find_model_source("self-tiny").load().spec.mean_recurrence
    trained, control = correct[:, depth - 1], once["correct"][:, 0].astype(float)

    def gain(other: np.ndarray, rows: np.ndarray) -> dict[str, float]:
        return _gain(trained, other, document, rows, benchmark.metric)

    residual, everyone = fixed["score/latent-diff"], np.ones(len(correct), bool)
    below = exits_at(running_extremum(residual, Rule("latent-diff", "below")), 1e-3)
    settled = below <= SELF_STEPS
    names = benchmark.subset_names["level"]
    levels = {}
    for code in np.unique(difficulty).tolist():
        rows = difficulty == code
        ten = exits_at(running_extremum(residual[rows], Rule("latent-diff", "below")), 0.1)
        levels[names[code]] = {
            "accuracy_by_iterations": _by_iterations(correct[rows]),
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
        "eps": _eps(benchmark),
    }


def _traced(name: str, benchmark: Benchmark, steps: int) -> dict[str, np.ndarray]:
    sequences = [s for document in benchmark.sample(SELF_DOCUMENTS, 0) for s in benchmark.sequences(document)]
    return trace(find_model_source(name).load(), sequences, TracePlan(("latent-diff",), steps, 0))


def _eps(benchmark: Benchmark) -> dict[str, dict[str, float]]:
    """The sweep over eps, executed: each token stopping by itself, and each sequence as a whole."""
    model = find_model_source("self-tiny").load()
    sequences = [s for document in benchmark.sample(SELF_DOCUMENTS, 0) for s in benchmark.sequences(document)]
    found: dict[str, dict[str, float]] = {str(eps): {} for eps in SELF_EPS}
    for name, rule in EPS_RULES.items():
        taus = np.array(SELF_EPS)[:, None, None]
        done = execute_stacked(model, sequences, ThresholdPolicy(rule, np.nan), taus, max_steps=SELF_STEPS)
        for own, steps, correct, never in zip(found.values(), done.steps, done.correct, done.never_fired, strict=True):
            own[f"{name}_iterations"] = float(steps.mean())
            own[f"{name}_accuracy"] = float(correct.mean())
            own[f"{name}_never"] = float(never.mean())
    return found


def _spearman(first: np.ndarray, second: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(first, second).statistic)
