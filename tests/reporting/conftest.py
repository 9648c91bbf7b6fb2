"""A small simulated run with everything a report must cope with: two benchmarks of opposite direction, rules that work,
one that reaches no equal quality, one without a curve, one that does not apply, a cell that failed, nonfinite rows,
executed points and noisy latencies.

Shapes: N tokens, R steps.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from halting_bench.records import POINT_COLUMNS
from halting_bench.store import Run

STEPS, FULL, TOKENS, DOCUMENTS = 16, 8, 1600, 32
BELOW = {
    "latent-diff": 0.9,
    "step-norm": 0.7,
    "cosine": 0.8,
    "acceleration": 0.6,
    "acceleration-norm": 0.45,
    "step-ratio": 0.3,
    "kl": 0.95,
    "min-p-kl": 0.85,
    "entropy-diff": 0.7,
    "entropy": 0.9,
    "entropy-and-kl": 0.88,
    "fixed-point-inf": 0.5,
}
NO_CURVE, UNREACHED = "entropy-and-kl", "fixed-point-inf"
ABOVE = {"max-prob": 0.9, "margin": 0.92}
LOGITS = {"kl", "min-p-kl", "entropy-diff", "entropy", "entropy-and-kl", "max-prob", "margin"}
ENDS = {"": 0.0, "_lo": -0.01, "_hi": 0.01}
BENCHMARKS = {"shell": ("accuracy", True), "docs": ("bits_per_byte", False)}


class Simulation:
    """Tokens that settle at different steps, and signals that notice it more or less well."""

    def __init__(self, benchmark: str, seed: int):
        rng = np.random.default_rng(seed)
        self.metric, self.higher = BENCHMARKS[benchmark]
        self.document = np.repeat(np.arange(DOCUMENTS), TOKENS // DOCUMENTS)
        self.level = rng.integers(0, 4, TOKENS)
        settle = np.clip(rng.gamma(2.0, 1 + 0.8 * self.level), 1, STEPS)
        k = np.arange(1, STEPS + 1)
        late = np.maximum(settle[:, None] - k, 0)
        if self.higher:
            wrong = rng.random(TOKENS)[:, None] < 0.02 + 0.25 * late
            self.outcome = 1.0 - wrong
        else:
            self.outcome = 1.2 + 0.5 * rng.random((TOKENS, 1)) + 0.4 * late + 0.05 * rng.standard_normal((TOKENS, STEPS))
        pace = np.exp(-(k - settle[:, None]) / 2.5)
        noise = rng.standard_normal((TOKENS, STEPS))
        self.scores = {name: pace**sharp * np.exp(0.9 * (1 - sharp) * noise) for name, sharp in BELOW.items()}
        for name, sharp in ABOVE.items():
            self.scores[name] = 1 / (1 + pace**sharp * np.exp((1 - sharp) * noise))
        self.subsets = {"all": np.ones(TOKENS, bool)}
        family = "level" if self.higher else "class"
        names = ("1-2", "3-4", "5-6", "7-8") if self.higher else ("letters", "digits", "punctuation", "whitespace")
        self.subsets |= {f"{family}:{name}": self.level == i for i, name in enumerate(names)}
        self.splits = {"calibration": self.document % 2 == 0, "test": self.document % 2 == 1}

    def exits(self, policy: str, threshold: float) -> np.ndarray:
        if policy == "fixed":
            return np.full(TOKENS, int(threshold))
        if policy == "oracle-loss":
            cost = (-1 if self.higher else 1) * self.outcome + threshold * np.arange(1, STEPS + 1)
            return 1 + cost.argmin(axis=1)
        if policy.startswith("random@"):
            return np.random.default_rng(0).permutation(self.exits(policy.removeprefix("random@"), threshold))
        fires = self.scores[policy] > threshold if policy in ABOVE else self.scores[policy] < threshold
        return np.where(fires.any(axis=1), 1 + fires.argmax(axis=1), STEPS)

    def flops(self, policy: str, depth: float) -> float:
        """A step costs two; a rule on logits reads them at every step, for three."""
        return 1e6 * (3 + 2 * depth + (3 * depth if policy in LOGITS else 0))

    def figures(self, exits: np.ndarray, keep: np.ndarray) -> dict:
        value = self.outcome[np.arange(TOKENS), exits - 1][keep]
        half = 1.96 * value.std() / np.sqrt(keep.sum())
        return {
            "n_documents": DOCUMENTS // 2,
            "n_tokens": int(keep.sum()),
            "mean_depth": exits[keep].mean(),
            "depth_p50": np.median(exits[keep]),
            "depth_p95": np.quantile(exits[keep], 0.95),
            "exhausted_fraction": (exits[keep] == STEPS).mean(),
            "never_fired_fraction": (exits[keep] == STEPS).mean() / 2,
            "quality": value.mean(),
            "quality_lo": value.mean() - half,
            "quality_hi": value.mean() + half,
            "quality_full_depth": self.outcome[keep, FULL - 1].mean(),
        }


def defaults(benchmark: str) -> dict:
    base = {name: "" if kind == "string" else 0 for name, kind in POINT_COLUMNS.items()}
    metric, higher = BENCHMARKS[benchmark]
    return base | {
        "model": "huginn-tiny",
        "benchmark": benchmark,
        "subset": "all",
        "metric": metric,
        "higher_is_better": higher,
        "threshold": np.nan,
        "evidence": "replayed",
        "kv_mode": "full",
        "max_steps": STEPS,
        "role": "grid",
        "on_front": False,
        "distinct": True,
        "status": "ok",
        **{name: np.nan for name in ("mean_depth", "quality", "quality_lo", "quality_hi", "quality_full_depth")},
    }


def simulate(benchmark: str, seed: int) -> dict[str, list[dict]]:
    sim = Simulation(benchmark, seed)
    base = defaults(benchmark)
    where = {"model": "huginn-tiny", "benchmark": benchmark, "seed": 0}
    sign = 1 if sim.higher else -1
    rows: dict[str, list[dict]] = {name: [] for name in ("points", "iso", "curves", "convergence", "exits")}

    def record(policy: str, threshold: float, role: str = "grid", **changes: object) -> None:
        exits = sim.exits(policy, threshold)
        for split, documents in sim.splits.items():
            for subset, members in sim.subsets.items():
                own = {"policy": policy, "threshold": threshold, "split": split, "subset": subset, "role": role}
                figures = sim.figures(exits, documents & members)
                cost = {"flops_per_token": sim.flops(policy, figures["mean_depth"])}
                rows["points"].append(base | own | figures | cost | changes)

    grids = {name: np.quantile(scores, np.linspace(0.02, 0.98, 9)) for name, scores in sim.scores.items()}
    for policy, grid in grids.items():
        for threshold in grid:
            record(policy, threshold)
            record(f"random@{policy}", threshold, "control")
        for split, documents in sim.splits.items():
            for threshold in np.quantile(sim.scores[policy], np.linspace(0, 1, 120)) if policy != NO_CURVE else ():
                figures = sim.figures(sim.exits(policy, threshold), documents)
                own = {"policy": policy, "split": split, "threshold": threshold}
                rows["curves"].append(where | own | {key: figures[key] for key in ("mean_depth", "quality")})
        for step in range(STEPS):
            median, p90, p10 = np.quantile(sim.scores[policy][:, step], (0.5, 0.9, 0.1))
            rows["convergence"].append(
                where | {"signal": policy, "step": step + 1, "median": median, "p90": p90, "p10": p10, "n": TOKENS}
            )
    for depth in range(1, STEPS + 1):
        record("fixed", float(depth), "control", on_front=depth < 4)
    for price in (0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
        record("oracle-loss", price, "control")

    uniform = {d: sim.figures(sim.exits("fixed", d), sim.splits["test"])["quality"] for d in range(1, STEPS + 1)}
    full = sim.figures(sim.exits("fixed", FULL), sim.splits["calibration"])["quality"]
    for policy, grid in {**grids, "fixed": np.arange(1.0, STEPS + 1), "oracle-loss": np.array([0.0, 0.02, 0.1])}.items():
        choices = [(sim.figures(sim.exits(policy, t), sim.splits["calibration"]), t) for t in grid]
        good = [(f["mean_depth"], t) for f, t in choices if sign * (f["quality"] - full) >= -0.01]
        given = where | {"policy": policy, "full_quality": uniform[FULL], "full_depth": float(FULL), "uniform_depth": 8.0}
        given |= {"gap_optimistic": True}
        if policy == UNREACHED:
            rows["iso"].append(given | {"threshold": np.nan, "status": "unreached", "error": "no threshold is good enough"})
            continue
        _, threshold = min(good)
        exits = sim.exits(policy, threshold)
        f = sim.figures(exits, sim.splits["test"])
        delta = sign * (f["quality"] - np.interp(f["mean_depth"], list(uniform), list(uniform.values())))
        own = {
            key: f[key]
            for key in ("quality", "quality_lo", "quality_hi", "mean_depth", "never_fired_fraction", "exhausted_fraction")
        }
        rows["iso"].append(
            given
            | own
            | {
                "threshold": threshold,
                "flops_per_token": sim.flops(policy, f["mean_depth"]),
                "status": "ok",
                "error": "",
                "saving_full": 1 - f["mean_depth"] / FULL,
                "saving_uniform": 1 - f["mean_depth"] / 8,
                "gap_share": np.nan if policy == "fixed" else delta,
                **{f"delta_{of}{end}": delta + shift for of in ("uniform", "random") for end, shift in ENDS.items()},
            }
        )
        for subset, members in sim.subsets.items():
            count = np.bincount(exits[members], minlength=STEPS + 1)
            own = {"policy": policy, "threshold": threshold, "role": "iso", "subset": subset}
            rows["exits"] += [where | own | {"step": k, "count": int(count[k])} for k in range(1, STEPS + 1) if count[k]]
    reason = {"policy": "gate-cdf", "status": "not_applicable", "error": "this model has no halting gate"}
    rows["points"].append(base | reason | {"split": "test"})
    rows["iso"].append(given | reason | {"threshold": np.nan})
    broken = {"policy": "latent-diff", "split": "test", "status": "failed", "error": "100 % | of_rows {broke}"}
    rows["points"].append(base | broken)
    return rows


@pytest.fixture(scope="session")
def run() -> Run:
    rows = [simulate(benchmark, seed) for seed, benchmark in enumerate(BENCHMARKS)]
    frames = {name: pd.DataFrame([row for part in rows for row in part[name]]) for name in rows[0]}
    points = frames["points"]
    points = points.astype({name: kind for name, kind in POINT_COLUMNS.items() if kind not in ("string", "bool")})
    points.loc[(points["policy"] == "kl") & (points["benchmark"] == "docs"), "nonfinite_fraction"] = 0.003
    points.loc[(points["policy"] == "margin") & (points["mean_depth"] < 6) & (points["split"] == "calibration"), "on_front"] = (
        True
    )
    empty = pd.DataFrame()
    return Run(
        Path("results/demo"),
        {"schema_version": 1},
        points,
        empty,
        frames["curves"],
        frames["convergence"],
        frames["exits"],
        empty,
        frames["iso"],
    )


@pytest.fixture(scope="session")
def executed_run(run: Run) -> Run:
    """The same run after its chosen points were executed and timed."""
    chosen = run.iso[run.iso["status"] == "ok"]
    keys = ["model", "benchmark", "seed", "policy", "threshold"]
    rows = run.points[(run.points["split"] == "test") & (run.points["subset"] == "all")].merge(chosen[keys], on=keys)
    rows = rows.assign(
        evidence="executed", kv_mode="latest", quality=rows["quality"] * 0.998, mean_depth=rows["mean_depth"] + 0.03
    )
    timed = rows[keys].assign(device="cpu, 2 threads", mode="eager", phase="decode", speedup=1.31, speedup_ideal=1.62)
    stages = json.dumps({"embed": 0.1, "core": 0.6, "readout": 0.2, "signal": 0.04, "bookkeeping": 0.06})
    timed = timed.assign(
        status="ok", error="", stages=stages, realised_fraction=0.5, tokens_per_s=1e4, noisy=timed["policy"] == "kl"
    )
    parts = [
        timed.assign(batch_rows=rows, latency_ms_per_token=0.4 / rows, p10=0.38 / rows, p90=0.45 / rows) for rows in (1, 8)
    ]
    return replace(run, points=pd.concat([run.points, rows], ignore_index=True), latency=pd.concat(parts, ignore_index=True))
