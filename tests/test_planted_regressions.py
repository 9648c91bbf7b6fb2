"""Regressions planted in a real model and a real policy, swept and gated as a user types it."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from halting_bench.catalog import find_model
from halting_bench.cli.main import app
from halting_bench.named import named_points
from halting_bench.rerun import settings_of
from halting_bench.store import read_manifest
from halting_bench.sweep_config import read_config

POLICY = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
from halting_bench import HaltingPolicy, Verdict


@dataclass(frozen=True)
class Settled(HaltingPolicy):
    """Stops a token once its state has moved less than the threshold."""

    threshold: float
    thresholds: ClassVar = (0.1, 0.3)

    def init(self, view):
        return {"latent": view.latent, "count": torch.zeros_like(view.step)}

    def step(self, view, state):
        moved = (view.latent - state["latent"]).norm(dim=-1) / view.latent.norm(dim=-1)
        count = torch.where(moved < self.threshold, state["count"] + 1, 0)
        return Verdict(count >= 2, moved), {"latent": view.latent, "count": count}
'''
RULES = """
rules:
  - {quantity: mean_depth, policy: Settled, threshold: 0.1, margin: 3%, other_model: true}
  - {quantity: quality, policy: fixed, threshold: 8, margin: 0.02, other_model: true}
"""
runner = CliRunner()


def halting_bench(*arguments: object) -> tuple[int, str]:
    done = runner.invoke(app, [str(each) for each in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with a policy, rules, and the run `base`."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "mine.py").write_text(POLICY)
    (folder / "gate.yaml").write_text(RULES)
    asked = ["--model", "huginn-tiny", "--benchmark", "shell", "--policy", f"{folder}/mine.py@Settled", "--limit", 24]
    quick = ["--no-execute", "--set", "plots=false", "--rules", folder / "gate.yaml"]
    assert halting_bench("sweep", *asked, *quick, "--out", folder / "base")[0] == 0
    return folder


def judged(base: Path, head: Path) -> dict[str, str]:
    """Exit code of the gate and its verdicts by policy."""
    code, table = halting_bench("gate", head, "--baseline", base / "base", "--rules", base / "gate.yaml", "--format", "csv")
    rows = [line.split(",") for line in table.splitlines()[1:3]]
    return {"exit code": str(code)} | {row[4]: row[1] for row in rows}


def like(base: Path, head: Path, *more: object) -> Path:
    assert halting_bench("sweep", "--like", base / "base", "--set", "plots=false", "--out", head, *more)[0] == 0
    return head


def test_a_sweep_like_another_asks_what_that_one_was_asked(base):
    asked = settings_of(read_manifest(base / "base"))
    again = read_config(None, {"limit": 8}, ["latency.enabled=false"], like=asked)
    assert (again.models, again.benchmarks, again.limit) == (("huginn-tiny",), ("shell",), 8)
    assert again.rules is None and not again.trust_remote_code and not again.execute
    named = named_points(again.model_copy(update={"like": str(base / "base")}), "huginn-tiny", "shell", ["Settled"])
    assert 0.1 in named["Settled"]


def test_a_policy_that_fires_one_step_early_fails_although_quality_is_kept(base, tmp_path):
    early = tmp_path / "mine.py"
    early.write_text(POLICY.replace("count >= 2", "count >= 1"))
    head = like(base, tmp_path / "head", "--policy", f"{early}@Settled")
    assert judged(base, head) == {"exit code": "1", "Settled": "FAIL", "fixed": "PASS"}


def test_a_weakened_checkpoint_fails_on_quality(base, tmp_path):
    weak = tmp_path / "weak"
    shutil.copytree(find_model("huginn-tiny")[0], weak)
    weights = load_file(weak / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: value + 0.5 * value.float().std(correction=0) * torch.randn(value.shape, generator=generator)
        for name, value in weights.items()
    }
    save_file({name: value.to(weights[name].dtype) for name, value in noisy.items()}, weak / "model.safetensors")
    head = like(base, tmp_path / "head", "--model", weak)
    found = judged(base, head)
    assert (found["exit code"], found["fixed"]) == ("1", "FAIL")
