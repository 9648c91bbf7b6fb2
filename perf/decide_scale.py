"""`compare` and `gate` on two runs of 5,000 points and 20,000 documents: seconds and peak memory, each in a fresh process.

Run: python -m perf.decide_scale
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from perf.figure import figure

COMMAND = "python -m perf.decide_scale"
POLICIES, THRESHOLDS, DEPTHS, DOCUMENTS = 17, 5, 16, 20_000

_CHILD = """
import json, resource, sys, time
start = time.perf_counter()
from perf.decide_scale import {what}
{what}(sys.argv[1])
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([time.perf_counter() - start, time.process_time(), memory]))
"""


def compare(folder: str) -> None:
    """What the command does, apart from parsing its arguments."""
    from halting_bench.reporting.comparison import comparison_tables
    from halting_bench.reporting.exports import render_all
    from halting_bench.store import load_run

    render_all(comparison_tables([load_run(f"{folder}/base"), load_run(f"{folder}/head")]), "md")


def gate(folder: str) -> None:
    """Every quantity of every policy."""
    from halting_bench.analysis.gate import gate as judge
    from halting_bench.analysis.rules import GateRules
    from halting_bench.reporting.gate import gate_table
    from halting_bench.store import load_run

    margins = {"quality": 0.01, "mean_depth": 0.1, "depth_at_equal_quality": 0.3, "quality_at_equal_depth": 0.01, "flops": "3%"}
    margins |= {"hypervolume": "5%", "gap_share": 0.1}
    asked = [{"quantity": name, "margin": margin, "policy": "rule-*"} for name, margin in margins.items()]
    judged = judge(load_run(f"{folder}/head"), load_run(f"{folder}/base"), GateRules.model_validate({"rules": asked}))
    known = sum(each.difference.lo == each.difference.lo for each in judged)
    if known != len(margins) * POLICIES:
        raise RuntimeError(f"{known} intervals, not {len(margins) * POLICIES}")
    gate_table(judged)


def write_run(folder: Path, seed: int) -> None:
    """A run of about 5,000 points, about 100 of them with figures by document."""
    import numpy as np
    import pandas as pd

    from halting_bench.records import POINT_COLUMNS, SCHEMA_VERSION
    from halting_bench.store import write_frame, write_json

    same, own = np.random.default_rng(0), np.random.default_rng(seed)
    identity = {"model": "demo", "benchmark": "docs", "seed": 0}
    counts = same.integers(20, 80, DOCUMENTS)
    hard = same.gamma(2.0, 0.5, DOCUMENTS)
    points, documents = [], []

    def add(policy: str, threshold: float, depth: float, keep: bool, *, spent_well: float = 1.0) -> None:
        quality = 1.0 + hard * np.exp(-depth * spent_well / 3) + 0.01 * own.standard_normal(DOCUMENTS)
        own_depth = (
            np.rint(counts * (depth + 0.3 * hard)).astype(np.int64) if policy != "fixed" else (counts * depth).astype(np.int64)
        )
        for split in ("calibration", "test"):
            points.append(
                {
                    **identity,
                    "policy": policy,
                    "threshold": threshold,
                    "split": split,
                    "mean_depth": depth,
                    "quality": float(quality.mean()),
                }
            )
        if keep:
            documents.append(pd.DataFrame({
                **identity, "policy": policy, "threshold": threshold, "split": "test", "document": np.arange(DOCUMENTS),
                "n_tokens": counts, "quality_sum": quality * counts, "depth_sum": own_depth,
                "evidence": "replayed", "params": "{}",
            }))  # fmt: skip

    names = [f"rule-{number}" for number in range(POLICIES)]
    for depth in range(1, DEPTHS + 1):
        add("fixed", float(depth), float(depth), True)
    add("oracle-loss", 0.0, 10.0, True, spent_well=1.5)
    add("oracle-loss", 0.1, 6.0, True, spent_well=1.5)
    grid = np.linspace(1.5, 15.5, 145)
    for name in names:
        for index, depth in enumerate(grid):
            add(name, float(index), float(depth), index % 29 == 14)
    frame = pd.DataFrame(points).assign(
        subset="all", metric="bits_per_byte", higher_is_better=False, evidence="replayed", status="ok", model_hash="a",
        max_steps=DEPTHS, flops_per_token=lambda f: 1e6 * f["mean_depth"],
    )  # fmt: skip
    empty = {"string": "", "bool": False, "int64": 0, "float64": np.nan}
    frame = frame.assign(**{name: empty[kind] for name, kind in POINT_COLUMNS.items() if name not in frame})
    iso = pd.DataFrame([{**identity, "policy": name, "threshold": 72.0, "status": "ok", "error": ""} for name in names])
    curves = pd.concat([
        pd.DataFrame({
            **identity, "policy": name, "split": "test", "threshold": grid, "mean_depth": grid,
            "quality": 1 + np.exp(-grid / 3),
        })
        for name in names
    ])  # fmt: skip
    write_frame(folder / "points.parquet", frame[list(POINT_COLUMNS)].astype(POINT_COLUMNS))
    write_frame(folder / "per_document.parquet", pd.concat(documents, ignore_index=True))
    write_frame(folder / "iso.parquet", iso)
    write_frame(folder / "curves.parquet", curves)
    environment = {
        "versions": {"torch": "2.9"},
        "dtype": "float32",
        "device": {"type": "cpu", "threads": 1},
        "cpu": {"model": "x"},
    }
    write_json(folder / "manifest.json", {
        "schema_version": SCHEMA_VERSION, "run_id": "scale", "config": {}, "policies": [], "environment": environment,
        "models": [{"model": "demo", "model_hash": "a"}], "benchmarks": [{"benchmark": "docs", "benchmark_hash": "b"}],
    })  # fmt: skip


def measurements() -> list[dict]:
    """Seconds and megabytes of both commands, importing included."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed, name in enumerate(("base", "head")):
            write_run(Path(scratch) / name, seed)
        for what in ("compare", "gate"):
            argv = [sys.executable, "-c", _CHILD.format(what=what), scratch]
            seconds, cpu, megabytes = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
            size = f"{what} of two runs with {DOCUMENTS:,} documents"
            rows.append(figure(size, seconds, "s", "<= 5", COMMAND))
            rows.append(figure(f"CPU time of {size}", cpu, "s", None, COMMAND))
            rows.append(figure(f"{size}, peak memory", megabytes, "MB", "<= 1000", COMMAND))
    return rows


if __name__ == "__main__":
    for row in measurements():
        print(row)
