"""A finished run of a simulated model, written to disk by the real tabulation: tokens that settle at different steps, and a
signal that notices it more or less well. A knob for each way in which a commit can make it worse.

Shapes: N tokens, R steps.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from halting_bench.analysis.pareto import mark_fronts
from halting_bench.analysis.selection import iso_rows, mark_iso
from halting_bench.catalog import show
from halting_bench.engine.controls import ORACLE_PRICES, fixed_exits, oracle_exits
from halting_bench.engine.points import (
    RowCost,
    Tallies,
    TracedUnit,
    choose_thresholds,
    grid_bounds,
    replay_exits,
    replay_thresholds,
)
from halting_bench.engine.replay import Rule, recorded_threshold
from halting_bench.plan import COMPLETE
from halting_bench.records import POINT_COLUMNS, SCHEMA_VERSION, Metric
from halting_bench.store import Run, load_run, write_arrays, write_frame, write_json
from halting_bench.sweep_config import SweepConfig
from halting_bench.tabulation import Points, point_rows, random_rows

STEPS, FULL = 12, 6
STEP = (1e3, 1.0)  # FLOPs of a step: fixed, and a token of context
RULES = {"latent-diff": Rule("latent-diff", "below"), "kl": Rule("kl", "below", min_steps=2)}


@dataclass(frozen=True)
class Simulated:
    """What a simulated commit is like."""

    documents: int = 60
    tokens: int = 40  # a document
    noise: int = 0  # seed of the initial states
    weaker: float = 0.0  # added to every token's loss
    early: int = 0  # the rule sees the score of this many steps later, and so fires early
    model_hash: str = "aaaa"
    metric: Metric = Metric.BITS_PER_BYTE
    benchmark: str = "docs"
    commit: str = "1111"

    def shard(self) -> dict[str, np.ndarray]:
        same, own = np.random.default_rng(0), np.random.default_rng(1000 + self.noise)
        count = self.documents * self.tokens
        document = np.repeat(np.arange(self.documents), self.tokens)
        settle = np.clip(same.gamma(2.0, 1.5, count) * np.exp(0.3 * same.standard_normal(self.documents))[document], 1, STEPS)
        k = np.arange(1, STEPS + 1)
        late = np.maximum(settle[:, None] - k, 0)
        loss = 1.0 + 0.5 * same.random((count, 1)) + 0.3 * late + self.weaker + 0.01 * own.standard_normal((count, STEPS))
        wrong = same.random((count, 1)) < 0.02 + 0.2 * late + self.weaker
        pace = np.exp(-(k + self.early - settle[:, None]) / 2)
        scores = {
            f"score/{name}": (pace * np.exp(spread * same.standard_normal((count, STEPS)))).astype(np.float32)
            for name, spread in (("latent-diff", 0.2), ("kl", 0.6))
        }
        return {
            **scores,
            "loss": loss.astype(np.float32),
            "correct": (~wrong).astype(np.uint8),
            "last_step": np.full(count, STEPS + 1, np.int16),
            "document": document,
            "position": np.tile(np.arange(self.tokens), self.documents).astype(np.int32),
        }


def write_run(folder: Path, world: Simulated) -> Run:
    """Writes the run directory, trace included, and reads it back."""
    shard = folder / "trace" / "demo" / world.benchmark / "0" / "00000.safetensors"
    write_arrays(shard, world.shard())
    write_json(shard.with_name(COMPLETE), {"shards": 1})
    write_json(shard.with_name(COMPLETE), {"shards": 1})
    cost = RowCost((100.0, 0.0), (1000.0, 1.0), (500.0, 0.0))
    unit = TracedUnit([shard], list(range(world.documents)), world.documents // 2, world.metric, cost, FULL)
    depths, prices = np.arange(1.0, STEPS + 1), np.array(ORACLE_PRICES)
    tallied: list[tuple[Points, Tallies]] = [
        (Points("fixed", depths, "control", 1, 1, "{}", False), replay_exits(unit, fixed_exits(STEPS), STEP)),
        (Points("oracle-loss", prices, "control", 1, 1, "{}", False), replay_exits(unit, oracle_exits(None), STEP)),
    ]  # fmt: skip
    curves = []
    for name, rule in RULES.items():
        choice = choose_thresholds(unit, rule, 8, folder / "trace")
        bounds = grid_bounds(rule, (), choice, unit.dtype)
        thresholds = recorded_threshold(bounds, rule)
        tallied.append((Points(name, thresholds, "grid", 1, 1, "{}", False), replay_thresholds(unit, rule, bounds, STEP)))
        curves += [pd.DataFrame({"policy": name, "split": split, **vars(curve)}) for split, curve in choice.curves.items()]
    rows = pd.concat(
        [point_rows(unit, *each) for each in tallied] + [random_rows(unit, *each) for each in tallied[2:]], ignore_index=True
    )
    mark_iso(rows, world.metric)
    identity = {"model": "demo", "benchmark": world.benchmark, "seed": 0}
    rows = rows.assign(
        **identity, subset="all", metric=world.metric.value, higher_is_better=world.metric.higher_is_better,
        evidence="replayed", model_hash=world.model_hash, max_steps=STEPS, kv_mode="full", distinct=True,
    )  # fmt: skip
    rows["on_front"] = mark_fronts(rows)
    known = rows[~rows["policy"].str.startswith("random@")]
    keep = known[
        known["policy"].isin(["fixed", "oracle-loss"])
        | (known["role"] == "iso")
        | (known["on_front"] & (known["split"] == "calibration"))
    ]
    per_document = []
    for points, tallies in tallied:
        whole = {name: sum(vars(t)[name] for t in tallies.values()) for name in ("quality", "depth")}
        for index, threshold in enumerate(points.thresholds):
            if threshold in set(keep.loc[keep["policy"] == points.policy, "threshold"]):
                per_document.append(
                    pd.DataFrame(
                        {
                            **identity,
                            "policy": points.policy,
                            "threshold": threshold,
                            "split": np.where(unit.in_split("calibration"), "calibration", "test"),
                            "document": unit.documents,
                            "n_tokens": unit.counts,
                            "quality_sum": whole["quality"][index],
                            "depth_sum": whole["depth"][index],
                            "evidence": "replayed",
                        }
                    )
                )
    frames = {
        "per_document": pd.concat(per_document, ignore_index=True),
        "curves": pd.concat(curves, ignore_index=True).assign(**identity),
        "iso": iso_rows(rows, world.metric, FULL).assign(**identity),
    }
    empty = {"string": "", "bool": False, "int64": 0, "float64": np.nan}
    rows = rows.assign(**{name: empty[kind] for name, kind in POINT_COLUMNS.items() if name not in rows})
    points_frame = rows[list(POINT_COLUMNS)].astype(POINT_COLUMNS)
    for name, frame in {**frames, "points": points_frame}.items():
        write_frame(folder / f"{name}.parquet", frame)
    write_json(folder / "manifest.json", manifest(world))
    return load_run(folder)


def manifest(world: Simulated) -> dict:
    recipes = [
        {"name": "latent-diff", "source": "test", "signal": "latent-diff"},
        {"name": "kl", "source": "test", "signal": "kl", "min_steps": 2},
    ]
    environment = {
        "commit": world.commit, "dirty": False, "halting_bench": "0.1.0", "python": "3.12.0", "system": "Linux",
        "versions": {"torch": "2.9.0", "numpy": "2.0.0"}, "cpu": {"model": "a processor", "cores": 2, "mhz": 2000.0},
        "dtype": "float32", "device": {"type": "cpu", "threads": 1},
    }  # fmt: skip
    config = show(SweepConfig(models=("demo",), benchmarks=(world.benchmark,)))
    job = {
        "model": "demo",
        "benchmark": world.benchmark,
        "documents": world.documents,
        "max_steps": STEPS,
        "full_depth": FULL,
        "seeds": [0],
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": "simulated",
        "config": json.loads(json.dumps(config)),
        "plan": {"jobs": [job]},
        "models": [{"model": "demo", "model_hash": world.model_hash, "mean_recurrence": FULL}],
        "benchmarks": [{"benchmark": world.benchmark, "benchmark_hash": "bbbb", "manifest": {}}],
        "policies": recipes,
        "environment": environment,
    }
