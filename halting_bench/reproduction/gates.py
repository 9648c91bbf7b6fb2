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
    """Each head's exits: at equal quality, as trained, over its thresholds, by level, and acted out."""
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
    whole = tested[tested["subset"] == "all"]
    own = tested[(tested["policy"] == rule) & (tested["threshold"] == threshold)]
    chosen = run.iso.sort_values("mean_depth", ascending=False)
    return {
        "equal_quality": _rows(chosen, [*CHOSEN, "status", "full_quality"]),
        "as_trained": _rows(own[own["subset"] == "all"], POINT)[0],
        "as_trained_by_level": _rows(own[own["subset"].str.startswith("level:")], ["subset", "mean_depth", "quality"]),
        "acted_out": _acted_out(name, rule, threshold, int(whole["max_steps"].iloc[0])),
        "curves": {
            policy: _rows(whole[whole["policy"] == policy].sort_values("mean_depth"), POINT[1:])
            for policy in ("fixed", rule, f"random@{rule}", *FREE_RULES)
        },
    }


def _acted_out(name: str, rule: str, threshold: float, max_steps: int) -> dict[str, float]:
    """The head's own rule stopping each position for real, on the test documents of the sweep."""
    source = find_model_source(name)
    model = source.load()
    benchmark = source.benchmark(BENCHMARK, model.spec)
    documents = benchmark.sample(DOCUMENTS, 0)
    tested = documents[split_size(DOCUMENTS, SweepConfig().calibration_fraction) :]
    sequences = [sequence for document in tested for sequence in benchmark.sequences(document)]
    done = execute(model, sequences, build_policy(catalog.find_policy(rule), threshold), max_steps=max_steps)
    _, document = np.unique(done.document, return_inverse=True)
    found: dict[str, float] = {}
    for what, values, bounded in (("mean_depth", done.exit_step, False), ("quality", done.correct, True)):
        means = mean_interval(np.bincount(document, values.astype(float))[None], np.bincount(document), bounded=bounded)
        found |= {f"{what}{end}": float(value[0]) for end, value in zip(("", "_lo", "_hi"), means, strict=True)}
    return found


def _rows(frame: "pd.DataFrame", columns: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(frame[columns].to_json(orient="records"))  # NaN becomes null
    return rows
