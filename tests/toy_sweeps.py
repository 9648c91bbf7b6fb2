"""Sweeps small enough to run in a second: a toy model, four documents, a few policies, float64."""

from pathlib import Path
from typing import Any

import pandas as pd

from halting_bench.architectures.toy import write_toy
from halting_bench.sweep_config import SweepConfig

PATIENT = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from halting_bench import HaltingPolicy, Verdict


@dataclass(frozen=True)
class Patient(HaltingPolicy):
    \"\"\"Stops once the largest component of the state has kept its place for `threshold` steps.\"\"\"

    threshold: float
    thresholds: ClassVar = (1.0, 2.0)

    @property
    def needs_logits(self):
        return False

    def init(self, view):
        return {"last": view.latent.argmax(dim=-1), "run": torch.zeros_like(view.step)}

    def step(self, view, state):
        here = view.latent.argmax(dim=-1)
        run = torch.where(here == state["last"], state["run"] + 1, 0)
        return Verdict(run >= self.threshold, run.double()), {"last": here, "run": run}
"""

POLICIES = ("latent-diff", "kl", "argmax-stable", "entropy-and-kl", "gate-cdf")
"""A latent and a logit rule, one with whole scores, a combination, and one that does not apply to the toy."""


def settings(folder: Path, **changes: Any) -> SweepConfig:
    """A sweep of the toy, which is written to `folder` if it is not there."""
    if not (folder / "toy").exists():
        write_toy(folder / "toy")
        (folder / "patient.py").write_text(PATIENT, encoding="utf-8")
    given = {
        "models": (str(folder / "toy"),),
        "benchmarks": ("shell",),
        "policies": (*POLICIES, f"{folder / 'patient.py'}@Patient"),
        "limit": 4,
        "max_steps": 6,
        "dtype": "float64",
        "device": "cpu",
        "shard_tokens": 100,
        "execute": False,
    }
    return SweepConfig(**(given | changes))


KEYS = ["model", "benchmark", "subset", "policy", "threshold", "split", "role", "evidence", "seed"]


def sorted_points(points: pd.DataFrame) -> pd.DataFrame:
    """Rows in an order of their own."""
    return points.sort_values(KEYS, kind="stable").reset_index(drop=True)


def assert_same_points(found: pd.DataFrame, wanted: pd.DataFrame) -> None:
    """Integers, flags and words exactly, reals to 1e-10; the run's own id apart."""
    found, wanted = (sorted_points(points.drop(columns=["run_id"])) for points in (found, wanted))
    pd.testing.assert_frame_equal(found, wanted, check_exact=False, rtol=1e-10, atol=1e-10)
