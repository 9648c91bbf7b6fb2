"""Routers: labels, training, figures, files."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from halting_bench.analysis.dynamics import relative_steps
from halting_bench.architectures.huginn import Huginn
from halting_bench.benchmarks.procedural import Shell
from halting_bench.catalog import find_policy
from halting_bench.engine.trace import TracePlan, trace
from halting_bench.errors import UserError
from halting_bench.halting.policy import View
from halting_bench.halting.routers import RouterPolicy, load_router, save_router
from halting_bench.plan import plan_policy
from halting_bench.records import Metric
from halting_bench.sources import find_model_source
from halting_bench.store import load_run
from halting_bench.sweep_config import LatencyConfig, SweepConfig
from halting_bench.sweeping.run import sweep
from halting_bench.training.router_comparison import compare
from halting_bench.training.router_run import train_router
from halting_bench.training.routers import (
    Harvest,
    RouterRecipe,
    auroc,
    calibration_error,
    fit,
    harvest,
    labels_of,
    probabilities,
    quality_of,
    router_scores,
)

torch.set_num_threads(1)
STEPS, WIDTH = 6, 8


def synthetic(seed: int, documents: int = 12, each: int = 40) -> Harvest:
    """Rows that need 1 to 5 steps; the first feature of a state says how many are still missing, the rest is noise."""
    rng = np.random.default_rng(seed)
    rows = documents * each
    needed = rng.integers(1, STEPS, rows)
    k = np.arange(1, STEPS + 1)
    missing = needed[:, None] - k
    latent = rng.normal(size=(rows, STEPS, WIDTH)).astype(np.float32)
    latent[:, :, 0] = missing + 0.8 * rng.normal(size=missing.shape)
    done = missing <= 0
    shard = {
        "correct": done.astype(np.uint8),
        "loss": np.where(done, 0.0, 2.0).astype(np.float32),
        "saturation": needed.astype(np.int16),
        "document": np.repeat(np.arange(documents), each),
        "score/kl": np.where(k == 1, np.nan, np.where(missing < 0, 1e-6, 1.0)).astype(np.float32),
    }
    for name in ("latent-diff", "acceleration", "entropy", "margin", "argmax-stable"):
        shard[f"score/{name}"] = rng.random((rows, STEPS)).astype(np.float32)  # knows nothing
    return Harvest(latent, shard, Metric.ACCURACY)


def test_labels_say_when_stopping_is_right() -> None:
    found = synthetic(0)
    needed, k = found.shard["saturation"][:, None], np.arange(1, STEPS + 1)
    saturated, first = labels_of(found, RouterRecipe("linear", "saturated"))
    assert first == 1
    np.testing.assert_array_equal(saturated, k >= needed)
    converged, first = labels_of(found, RouterRecipe("linear", "converged"))
    assert first == 2
    assert np.isnan(converged[:, 0]).all()
    np.testing.assert_array_equal(converged[:, 1:], (k > needed)[:, 1:])
    improvement, first = labels_of(found, RouterRecipe("linear", "improvement"))
    assert first == 1
    np.testing.assert_array_equal(improvement, k >= needed)


def test_the_gain_label_is_ouro_s_soft_target() -> None:
    found = synthetic(0)
    found.shard["loss"] = np.array([[2.0, 1.0, 0.995, 0.995, 1.5, 1.4]], np.float32)
    label, first = labels_of(found, RouterRecipe("gate", "gain"))
    assert first == 2 and np.isnan(label[0, 0])
    gained = (1.0, 0.005, 0.0, 0.0, 0.1)  # a loss that rises gains nothing
    wanted = [1 - 1 / (1 + math.exp(-50 * (gain - 0.005))) for gain in gained]
    assert label[0, 1:].tolist() == pytest.approx(wanted, abs=1e-4)


def test_a_gate_learns_its_soft_label_and_is_judged_step_by_step() -> None:
    recipe = RouterRecipe("gate", "gain", steps=300, batch=512)
    found = synthetic(1)
    router = fit(synthetic(0), recipe, "hash")
    told, label = quality_of(router, found, recipe), labels_of(found, recipe)[0]
    assert told["calibration_error"] < 0.05
    assert told["label_rate"] == pytest.approx(np.nanmean(label), abs=1e-6)
    known = ~np.isnan(label)
    assert told["auroc"] == pytest.approx(auroc(probabilities(router, found)[known], label[known] > 0.5))
    assert (np.diff(router_scores(router, found)[:, 1:], axis=1) >= 0).all()


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_router_learns_what_the_state_says_and_is_calibrated(kind: str, shared: bool) -> None:
    recipe = RouterRecipe(kind, "saturated", shared=shared, steps=300, batch=512)
    router = fit(synthetic(0), recipe, "hash")
    told = quality_of(router, synthetic(1), recipe)
    assert told["auroc"] > 0.93
    assert told["calibration_error"] < 0.05
    assert 0.5 < told["label_rate"] < 0.8
    assert len(router.bias) == (1 if shared else STEPS)


def test_a_router_stops_where_the_work_is_done_and_rules_that_know_nothing_do_not() -> None:
    recipe = RouterRecipe("linear", "saturated", steps=300, batch=512)
    routers = {"router": fit(synthetic(0), recipe, "hash")}
    rows = {row["rule"]: row for row in compare(synthetic(1), synthetic(2), routers, trained=STEPS)}
    assert rows["router"]["delta"] > -0.02
    assert rows["router"]["mean_depth"] < rows["fixed"]["mean_depth"] < rows["entropy"]["mean_depth"]
    assert rows["oracle-saturation"]["mean_depth"] <= rows["router"]["mean_depth"]
    assert rows["fixed"]["mean_depth"] == 5
    assert rows["router"]["depth_lo"] < rows["router"]["mean_depth"] < rows["router"]["depth_hi"]


def test_the_converged_label_is_never_asked_before_it_is_defined() -> None:
    router = fit(synthetic(0), RouterRecipe("linear", "converged", steps=50), "hash")
    assert np.isnan(router_scores(router, synthetic(1))[:, 0]).all()
    view = View(torch.ones(3, dtype=torch.int64), torch.zeros(3, WIDTH), lambda: torch.zeros(3, 2))
    policy = RouterPolicy(router, 0.0)
    verdict, _ = policy.step(view, policy.init(view))
    assert not verdict.halt.any()
    assert verdict.score.isnan().all()


def test_the_policy_scores_as_the_comparison_does() -> None:
    found = synthetic(3)
    for kind in ("linear", "mlp"):
        router = fit(found, RouterRecipe(kind, "saturated", shared=False, steps=30, batch=256), "hash")
        policy, scores = RouterPolicy(router, 0.6), router_scores(router, found)
        for k in range(1, STEPS + 1):
            step = torch.full((len(found.latent),), k)
            view = View(step, torch.from_numpy(found.latent[:, k - 1]), lambda: torch.zeros(1, 1))
            verdict, _ = policy.step(view, policy.init(view))
            np.testing.assert_array_equal(verdict.score.numpy(), scores[:, k - 1])
            np.testing.assert_array_equal(verdict.halt.numpy(), scores[:, k - 1] > 0.6)
            np.testing.assert_array_equal(probabilities(router, found)[:, k - 1], scores[:, k - 1])


@pytest.mark.parametrize("inputs", ["latent", "latent+change"])
@pytest.mark.parametrize("kind", ["linear", "mlp", "gate"])
def test_a_saved_router_is_the_same(kind: str, inputs: str, tmp_path) -> None:
    found = synthetic(0)
    router = fit(found, RouterRecipe(kind, "improvement", inputs=inputs, steps=20), "this")
    save_router(router, tmp_path / "router.safetensors", {"auroc": 0.9})
    again = load_router(tmp_path / "router.safetensors")
    assert again.model_hash == "this"
    np.testing.assert_array_equal(router_scores(again, found), router_scores(router, found))
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match="is not a router"):
        load_router(tmp_path / "junk.safetensors")


def test_the_policy_of_a_router_that_sees_change_scores_as_the_comparison_does() -> None:
    source = find_model_source("huginn-tiny")
    found = harvest(source.load(), Shell(), [3, 1], max_steps=9)
    recipe = RouterRecipe("linear", "saturated", inputs="latent+change", steps=20)
    router = fit(found, recipe, "hash")
    assert recipe.name == "router-linear-saturated-change" and router.first == 2
    sequences = [s for d in (3, 1) for s in Shell().sequences(d)]
    for threshold in (0.5, 0.8):
        plan = TracePlan((), 9, 0, opaque={"router": RouterPolicy(router, threshold)})
        scores = router_scores(router, found)
        assert np.isnan(scores[:, 0]).all()
        fired = np.nan_to_num(scores) > threshold
        exits = np.where(fired.any(1), fired.argmax(1) + 1, 10)
        assert (trace(source.load(), sequences, plan)["exit/router"] == exits).mean() > 0.99  # float32: two passes


@pytest.mark.parametrize(("kind", "label"), [("linear", "saturated"), ("gate", "gain")])
def test_a_sweep_takes_a_router_beside_the_free_rules_and_refuses_it_on_another_model(tmp_path, kind, label) -> None:
    source, other = find_model_source("huginn-tiny"), find_model_source("self-tiny")
    train_router(source, "shell", [RouterRecipe(kind, label, steps=30)], tmp_path, documents=12, max_steps=10)
    name = f"router-{kind}-{label}"
    path = str(tmp_path / f"{name}.safetensors")
    config = SweepConfig(
        models=("huginn-tiny",), benchmarks=("shell",), policies=(path, "kl"), limit=8, max_steps=10, execute=False,
        latency=LatencyConfig(enabled=False), plots=False,
    )  # fmt: skip
    run = load_run(sweep(config, out=tmp_path / "run"))
    points = run.points[(run.points["split"] == "test") & (run.points["subset"] == "all")].set_index("policy")
    mine = points.loc[name]
    assert mine["mean_depth"].is_monotonic_increasing
    assert mine["mean_depth"].nunique() > 3
    assert f"random@{name}" in points.index
    assert mine["flops_per_token"].min() < points.loc["kl", "flops_per_token"].min() * 2
    refused = plan_policy(find_policy(path), other.load().spec, 8, other.hash())
    assert f"the router was trained on model {source.hash()}" in refused.not_applicable


def test_training_is_seeded() -> None:
    recipe = RouterRecipe("mlp", "saturated", steps=20)
    first, again = fit(synthetic(0), recipe, "x"), fit(synthetic(0), recipe, "x")
    assert torch.equal(first.weight, again.weight)


def test_auroc_and_calibration_error_of_known_cases() -> None:
    label = np.array([0, 0, 1, 1])
    assert auroc(np.array([0.1, 0.2, 0.3, 0.4]), label) == 1.0
    assert auroc(np.array([0.4, 0.3, 0.2, 0.1]), label) == 0.0
    assert auroc(np.array([0.5, 0.5, 0.5, 0.5]), label) == 0.5
    assert np.isnan(auroc(np.array([0.1]), np.array([1])))
    assert calibration_error(np.array([0.25, 0.25, 0.25, 0.25]), np.array([1, 0, 0, 0])) == pytest.approx(0.0)
    assert calibration_error(np.array([0.9, 0.9]), np.array([0, 0])) == pytest.approx(0.9)


def test_a_label_that_never_changes_cannot_be_learned() -> None:
    with pytest.raises(UserError, match="nothing to learn"):
        fit(synthetic(0), RouterRecipe("linear", "converged", epsilon=1e-12), "x")


def test_a_harvest_keeps_the_state_of_every_scored_row_in_the_order_of_the_trace() -> None:
    torch.manual_seed(0)
    config = {
        "n_embd": 16, "n_heads": 2, "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 1, "n_layers_in_coda": 1,
        "intermediate_size": 24, "block_size": 64, "padded_vocab_size": 256, "mean_recurrence": 2, "norm_eps": 1e-6,
        "rope_base": 1000, "init_values": {},
    }  # fmt: skip
    model, task = Huginn(config).eval().requires_grad_(False), Shell()
    found = harvest(model, task, [3, 1], max_steps=3)
    sequences = [s for d in (3, 1) for s in task.sequences(d)]
    shard = trace(model, sequences, TracePlan(("latent-diff",), 3, 0))
    np.testing.assert_array_equal(found.shard["document"], shard["document"])
    followed = relative_steps(found.latent.astype(np.float64))
    np.testing.assert_allclose(followed, shard["score/latent-diff"][:, 1:], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kind": "gates"}, "unknown router kind 'gates': did you mean 'gate'"),
        ({"label": "gian"}, "unknown router label 'gian': did you mean 'gain'"),
        ({"inputs": "change"}, "unknown router inputs 'change'"),
    ],
)
def test_an_unknown_kind_label_or_inputs_suggests_the_nearest(given: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        RouterRecipe(**{"kind": "linear", "label": "saturated"} | given)


@pytest.mark.parametrize("told", [{"kind": "tree"}, {"inputs": "past"}, {"kind": ["gate"]}, {"first": "two"}])
def test_a_router_file_of_another_make_is_refused(told: dict, tmp_path) -> None:
    known = {"kind": "gate", "label": "gain", "first": 2, "model_hash": "0", "inputs": "latent"}
    path = tmp_path / "router.safetensors"
    save_file({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}, path, metadata={"router": json.dumps(known | told)})
    with pytest.raises(UserError, match="is not a router"):
        load_router(path)


@pytest.mark.parametrize("steps", [0, -3])
def test_a_number_of_steps_that_is_none_is_refused(steps: int) -> None:
    with pytest.raises(UserError, match=f"--max-steps {steps} is no number of steps"):
        train_router(find_model_source("huginn-tiny"), "shell", [], None, documents=8, max_steps=steps)


def test_a_router_is_refused_a_place_that_is_a_file_before_anything_is_computed(tmp_path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot write to .*file \(.*\): choose another --out"):
        train_router(find_model_source("huginn-tiny"), "no such benchmark", [], tmp_path / "file", documents=8)


@pytest.mark.parametrize("inputs", ["latent", "latent+change"])
def test_states_that_are_not_finite_teach_nothing(inputs: str) -> None:
    found = synthetic(0)
    broken = replace(found, latent=np.full_like(found.latent, np.nan))
    with pytest.raises(UserError, match="no state of this model is finite"):
        fit(broken, RouterRecipe("gate", "gain", inputs=inputs), "hash")
