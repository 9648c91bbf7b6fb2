"""Halting heads trained with their model (PonderNet, arXiv 2107.05407; ACT, arXiv 1603.08983) beside the free rules.

All rules see the same trajectories. Shapes: N scored rows, M documents.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench import catalog
from halting_bench.analysis.statistics import mean_interval
from halting_bench.engine.score import execute
from halting_bench.plan import build_policy, split_size
from halting_bench.sources import find_model_source
from halting_bench.store import load_run
from halting_bench.sweep_config import LatencyConfig, SweepConfig
from halting_bench.sweeping.run import sweep

if TYPE_CHECKING:
    import pandas as pd

HEADS = {"huginn-tiny-ponder": ("gate-cdf", 0.5), "huginn-tiny-act": ("act", 0.99)}
"""Model -> the rule of its head, and the threshold that its training had in mind."""
FREE_RULES = ("kl", "latent-diff", "entropy", "margin")
BENCHMARK, DOCUMENTS = "shell", 256
POINT = ["policy", "threshold", "mean_depth", "quality", "quality_lo", "quality_hi", "never_fired_fraction"]
CHOSEN = [*POINT, "delta_uniform", "delta_uniform_lo", "delta_uniform_hi", "delta_random", "delta_random_lo", "delta_random_hi"]


def gates() -> dict[str, Any]:
    """Each head beside the free rules: at equal quality, by level, as trained, acted out, and over all thresholds."""
    return {name: _measured(name, *own) for name, own in HEADS.items()}


def _measured(name: str, rule: str, threshold: float) -> dict[str, Any]:
    """Thresholds are chosen on the first half of the documents; every figure is of the other half."""
    with TemporaryDirectory() as folder:
        config = SweepConfig(
            models=(name,), benchmarks=(BENCHMARK,), policies=(rule, *FREE_RULES), limit=DOCUMENTS, execute=False,
            plots=False, latency=LatencyConfig(enabled=False),
        )  # fmt: skip
        run = load_run(sweep(config, out=Path(folder) / "run"))
    tested = run.points[(run.points["split"] == "test") & (run.points["status"] == "ok")]
    whole, levels = tested[tested["subset"] == "all"], tested[tested["subset"].str.startswith("level:")]
    trained = whole[(whole["policy"] == rule) & (whole["threshold"] == threshold)]
    chosen = run.iso[run.iso["status"] == "ok"].sort_values("mean_depth", ascending=False)
    points = chosen.loc[chosen["policy"].isin((rule, *FREE_RULES)), ["policy", "threshold"]].itertuples(index=False)
    return {
        "equal_quality": _rows(chosen, [*CHOSEN, "full_quality"]),
        "by_level": _rows(levels[levels["role"] == "iso"], ["policy", "subset", "mean_depth", "quality"]),
        "as_trained": _rows(trained, POINT)[0],
        "acted_out": _acted_out(name, [(rule, threshold), *points], int(whole["max_steps"].iloc[0])),
        "curves": {
            policy: _rows(whole[whole["policy"] == policy].sort_values("mean_depth"), POINT[1:])
            for policy in ("fixed", rule, f"random@{rule}", *FREE_RULES)
        },
    }


def _acted_out(name: str, points: list[tuple[str, float]], max_steps: int) -> list[dict[str, Any]]:
    """Rules that stop each position for real, on the test documents of the sweep: later positions see what it froze at."""
    source = find_model_source(name)
    model = source.load()
    benchmark = source.benchmark(BENCHMARK, model.spec)
    documents = benchmark.sample(DOCUMENTS, 0)
    tested = documents[split_size(DOCUMENTS, SweepConfig().calibration_fraction) :]
    sequences = [sequence for document in tested for sequence in benchmark.sequences(document)]
    found = []
    for policy, threshold in points:
        done = execute(model, sequences, build_policy(catalog.find_policy(policy), threshold), max_steps=max_steps)
        row: dict[str, Any] = {"policy": policy, "threshold": threshold}
        _, document = np.unique(done.document, return_inverse=True)
        for what, values, bounded in (("mean_depth", done.exit_step, False), ("quality", done.correct, True)):
            sums = np.bincount(document, values.astype(float))[None]
            for end, value in zip(("", "_lo", "_hi"), mean_interval(sums, np.bincount(document), bounded=bounded), strict=True):
                row[what + end] = float(value[0])
        found.append(row)
    return found


def _rows(frame: "pd.DataFrame", columns: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(frame[columns].to_json(orient="records"))  # NaN becomes null
    return rows
