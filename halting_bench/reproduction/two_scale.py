"""Two-scale dynamics (arXiv 2509.23314): drift between loops, and exit rules executed and timed."""

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from halting_bench import catalog
from halting_bench.diagnosis import diagnose_source
from halting_bench.engine.multi_loop import GivenDepth, execute_stacked
from halting_bench.executed_sweep import Setting, executed_cells
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.plan import build_policy, plan_policy
from halting_bench.records import Metric
from halting_bench.sources import find_model_source

TWO_SCALE_RULES = ("acceleration", "acceleration-jointly", "step-norm", "step-norm-change", "kl")
TWO_SCALE = {
    "two-scale-tiny": ("shell", 64, 4),
    "two-scale-tiny-gate": ("shell", 64, 4),
    "two-scale-tiny-text": ("docs", 24, 1),
}
"""Model -> benchmark, documents, sequences of each."""
TIMES = 3


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
    del found["training"]  # the log beside the model has it
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
