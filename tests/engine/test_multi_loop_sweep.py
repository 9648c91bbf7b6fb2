"""Rows of an executed sweep."""

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from runtime_models import VOCAB, TwoLoops, tiny_huginn

from halting_bench.architectures.base import Flops
from halting_bench.benchmarks.base import Benchmark, Sequence
from halting_bench.catalog import find_policy
from halting_bench.engine.replay import Rule, exits_at, running_extremum, signed_threshold
from halting_bench.engine.score import execute
from halting_bench.executed_grid import depth_thresholds
from halting_bench.executed_sweep import Setting, executed_cells
from halting_bench.halting.policies import Jointly, ThresholdPolicy
from halting_bench.plan import plan_policy
from halting_bench.records import POINT_COLUMNS, Metric

torch.set_num_threads(1)
STEPS = 5


class Random(Benchmark):
    """Two random sequences a document; positions are in two subsets."""

    name, metric, subset_names = "random", Metric.ACCURACY, {"half": ("first", "second")}

    def manifest(self) -> dict:
        return {}

    def sample(self, limit: int | None, seed: int) -> list[int]:
        return list(range(limit or 6))

    def sequences(self, document: int) -> list[Sequence]:
        rng, out = np.random.default_rng(document), []
        for index in range(2):
            tokens = rng.integers(0, VOCAB, 7)
            half = (np.arange(6) >= 3).astype(np.int16)
            out.append(Sequence(document, document * 2 + index, tokens[:-1], tokens[1:], {"half": half}))
        return out


class Costly(TwoLoops):
    """With costs that tell the stages apart."""

    def costs(self) -> dict[str, Flops]:
        return {"embed": Flops(1e6), "step/0": Flops(1e3), "step/1": Flops(10.0), "readout": Flops(1.0)}


def swept(*policies: str) -> "tuple":
    model = Costly()
    plans = tuple(plan_policy(find_policy(name), model.spec, STEPS) for name in policies)
    cells = executed_cells(model, Random(), Random().sample(6, 0), plans, Setting(max_steps=STEPS, calibration=3))
    rows = pd.concat([make() for _, make in cells], ignore_index=True)
    return model, rows


def test_every_point_is_what_executing_it_alone_gives() -> None:
    model, rows = swept("kl", "latent-diff")
    assert set(rows["policy"]) == {"fixed", "kl", "random@kl", "latent-diff", "random@latent-diff"}
    assert set(rows.columns) - set(POINT_COLUMNS) == {"fingerprint", "delta_uniform", "delta_uniform_lo", "delta_uniform_hi"}
    assert set(rows["evidence"]) == {"executed"}
    sequences = [s for d in range(3, 6) for s in Random().sequences(d)]
    assert rows.loc[rows["policy"] == "kl", "params"].str.contains('"provisional": true').all()
    found = rows[(rows["policy"] == "latent-diff") & (rows["split"] == "test") & (rows["subset"] == "all")]
    same = found[~found["params"].str.contains("thresholds")]
    assert len(same) >= 3  # those that the recipe names
    for _, row in same.iterrows():
        alone = execute(model, sequences, ThresholdPolicy("latent-diff", row["threshold"]), max_steps=STEPS)
        assert row["mean_depth"] == pytest.approx(alone.exit_step.mean())
        assert row["quality"] == pytest.approx(alone.correct.mean())
        assert json.loads(row["depth_per_loop"]) == pytest.approx(alone.exit_per_loop.mean(axis=0).tolist(), abs=1e-4)
        steps = alone.exit_per_loop.mean(axis=0)
        signal = plan_policy(find_policy("latent-diff"), model.spec, STEPS).signal_flops
        assert row["flops_per_token"] == pytest.approx(1e6 + 1.0 + steps @ [1e3, 10.0] + steps.sum() * signal)
        assert row["n_tokens"] == len(alone.exit_step) == 36


def test_uniform_depths_and_random_controls_frame_the_points() -> None:
    _, rows = swept("step-norm")
    whole = rows[rows["subset"] == "all"]
    fixed = whole[(whole["policy"] == "fixed") & (whole["split"] == "test")]
    assert fixed["mean_depth"].tolist() == [2.0 * k for k in range(1, STEPS + 1)]
    assert fixed["delta_uniform"].abs().max() < 1e-12
    assert (fixed["quality_full_depth"] == fixed["quality"].iloc[3]).all()
    rule = whole[(whole["policy"] == "step-norm") & (whole["split"] == "test")].set_index("threshold")
    drawn = whole[(whole["policy"] == "random@step-norm") & (whole["split"] == "test")].set_index("threshold")
    assert len(rule) > 3
    assert (rule["mean_depth"] - drawn["mean_depth"]).abs().max() < 2.0
    assert rule["mean_depth"].nunique() > 2


def test_subsets_add_up_to_the_whole() -> None:
    _, rows = swept("step-norm")
    rule = rows[(rows["policy"] == "step-norm") & (rows["split"] == "test")]
    whole = rule[rule["subset"] == "all"].set_index("threshold")
    halves = rule[rule["subset"] != "all"]
    total = halves.assign(sum=halves["quality"] * halves["n_tokens"]).groupby("threshold")[["sum", "n_tokens"]].sum()
    np.testing.assert_allclose(total["sum"] / total["n_tokens"], whole["quality"])


def test_a_policy_that_cannot_be_executed_says_why() -> None:
    _, rows = swept("entropy-and-kl", "gate-cdf")
    blank = rows[rows["status"] == "not_applicable"].set_index("policy")["error"]
    assert blank["gate-cdf"] == "the model has no halting gate"
    assert "one threshold" in blank["entropy-and-kl"]


@pytest.mark.parametrize("fires", ["below", "above"])
def test_thresholds_are_spread_over_the_depths_they_give(fires: str) -> None:
    rng = np.random.default_rng(0)
    scores = np.sort(rng.random((400, 8)), axis=1)
    scores = scores[:, ::-1] if fires == "below" else scores
    rule = Rule("x", fires)
    found = depth_thresholds(scores, rule, 5)
    extremum = running_extremum(scores, rule)
    depths = [np.minimum(exits_at(extremum, b), 8).mean() for b in signed_threshold(found, rule, scores.dtype)]
    assert all(deep > shallow for deep, shallow in itertools.pairwise(depths))
    np.testing.assert_allclose(np.diff(depths), np.diff(depths).mean(), atol=0.2)


def test_one_decision_for_all_loops_is_swept_by_the_first_loops_thresholds() -> None:
    model, rows = swept("latent-diff-jointly")
    sequences = [s for d in range(3, 6) for s in Random().sequences(d)]
    found = rows[(rows["policy"] == "latent-diff-jointly") & (rows["split"] == "test") & (rows["subset"] == "all")]
    assert found["mean_depth"].nunique() > 3
    signal = plan_policy(find_policy("latent-diff"), model.spec, STEPS).signal_flops
    for _, row in found.iterrows():  # one threshold names every point
        alone = execute(model, sequences, Jointly(ThresholdPolicy("latent-diff", row["threshold"])), max_steps=STEPS)
        assert row["quality"] == pytest.approx(alone.correct.mean())
        one, other = json.loads(row["depth_per_loop"])
        assert one == other == pytest.approx(alone.exit_per_loop[:, 0].mean(), abs=1e-4)
        assert row["flops_per_token"] == pytest.approx(1e6 + 1.0 + one * (1e3 + 10.0 + signal), rel=1e-6)


def test_a_joint_rule_that_reads_logits_reads_them_in_the_first_loop_and_answers_once_more(tmp_path: Path) -> None:
    recipe = tmp_path / "entropy-jointly.yaml"
    recipe.write_text("{name: entropy-jointly, signal: entropy, jointly: true, source: a test, grid: {quantiles: 3}}")
    _, rows = swept(str(recipe))
    found = rows[(rows["policy"] == "entropy-jointly") & (rows["split"] == "test") & (rows["subset"] == "all")]
    assert found["params"].str.contains('"provisional": true').all()
    looks = found["depth_per_loop"].map(lambda told: json.loads(told)[0])
    np.testing.assert_allclose(found["readouts"] / found["n_tokens"], looks + 1, atol=1e-3)


def test_one_decision_for_all_loops_needs_several() -> None:
    spec = tiny_huginn().spec
    reason = plan_policy(find_policy("acceleration-jointly"), spec, STEPS).not_applicable
    assert reason == "one decision for all loops is for models of several loops"
