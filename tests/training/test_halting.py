"""Halting heads: PonderNet's and ACT's objectives against slow ones, and a model that is trained with one."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_recipe import CONFIG

from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.load import load_model
from halting_bench.benchmarks.base import NOT_SCORED
from halting_bench.catalog import find_policy
from halting_bench.errors import UserError
from halting_bench.plan import plan_policy
from halting_bench.store import load_run
from halting_bench.sweep_config import LatencyConfig, SweepConfig
from halting_bench.sweeping.run import sweep
from halting_bench.training import train as training
from halting_bench.training.halting import act_weights, exit_distribution, geometric_prior, ponder_loss
from halting_bench.training.objective import objective, unroll
from halting_bench.training.recipe import load_recipe
from halting_bench.training.train import CHECKPOINT, train

torch.set_num_threads(1)
WITH_HEAD = CONFIG | {"halting_head": True}
PONDER, ACT = {"kind": "ponder", "beta": 0.1, "prior": 0.3}, {"kind": "act", "tau": 0.1}
SMALL = {"batch_tokens": 96, "depth": {"mean": 3, "cap": 6, "backprop": 2}, "checkpoint_every": 2, "log_every": 1000}


def gates(steps: int, rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.05 + 0.6 * torch.rand(steps, rows, generator=generator, dtype=torch.float64)


def slow_ponder(gate: list[float], losses: list[float], beta: float, prior: float) -> float:
    """One position, as the paper puts it."""
    left, total, divergence = 1.0, 0.0, 0.0
    norm = sum(prior * (1 - prior) ** k for k in range(len(gate)))
    for k, (chance, loss) in enumerate(zip(gate, losses, strict=True)):
        p = left if k == len(gate) - 1 else left * chance
        left *= 1 - chance
        total += p * loss
        divergence += p * math.log(p / (prior * (1 - prior) ** k / norm))
    return total + beta * divergence


def slow_act(gate: list[float], epsilon: float) -> tuple[list[float], float]:
    """One position: its weights and what it pays."""
    weights, total = [0.0] * len(gate), 0.0
    for k, chance in enumerate(gate):
        if total + chance >= 1 - epsilon or k == len(gate) - 1:
            weights[k] = 1 - total
            return weights, k + 1 + weights[k]
        weights[k] = chance
        total += chance
    raise AssertionError("the last step takes the remainder")


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_ponder_loss_is_the_obvious_sum(steps: int) -> None:
    gate, losses = gates(steps, 5), 3 * gates(steps, 5, seed=1)
    rows = zip(gate.T.tolist(), losses.T.tolist(), strict=True)
    wanted = sum(slow_ponder(*row, beta=0.2, prior=0.3) for row in rows) / 5
    assert float(ponder_loss(gate, losses, beta=0.2, prior=0.3)) == pytest.approx(wanted, abs=1e-6)  # a float32 prior


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_act_weights_and_cost_are_the_obvious_ones(steps: int) -> None:
    gate = gates(steps, 40)
    weights, cost = act_weights(gate, 0.01)
    for row in range(40):
        wanted, paid = slow_act(gate[:, row].tolist(), 0.01)
        assert weights[:, row].tolist() == pytest.approx(wanted, abs=1e-12)
        assert float(cost[row]) == pytest.approx(paid, abs=1e-12)
    assert steps < 7 or len(set(cost.long().tolist())) > 1


def test_every_distribution_sums_to_one() -> None:
    gate = gates(6, 30)
    for shares in (exit_distribution(gate), act_weights(gate, 0.01)[0]):
        torch.testing.assert_close(shares.sum(0), torch.ones(30, dtype=torch.float64))
        assert bool((shares >= 0).all())
    prior = geometric_prior(5, 0.2)
    assert float(prior.sum()) == pytest.approx(1) and float(prior[1] / prior[0]) == pytest.approx(0.8)


def test_the_divergence_is_zero_at_the_prior_and_a_certain_gate_has_a_finite_gradient() -> None:
    prior = geometric_prior(4, 0.3).double()
    own = prior / (1 - torch.cat((torch.zeros(1, dtype=torch.float64), prior.cumsum(0)[:-1])))
    assert float(ponder_loss(own[:, None], torch.zeros(4, 1), beta=1.0, prior=0.3)) == pytest.approx(0, abs=1e-6)
    certain = torch.tensor([[0.0], [1.0], [1.0]], requires_grad=True)
    ponder_loss(certain, torch.ones(3, 1), beta=1.0, prior=0.3).backward()
    assert certain.grad is not None and bool(certain.grad.isfinite().all())


def test_act_is_charged_for_its_steps_and_pushed_to_halt_sooner() -> None:
    gate = gates(6, 30).requires_grad_()
    weights, cost = act_weights(gate, 0.01)
    cost.sum().backward()
    assert gate.grad is not None
    before_last = (weights > 0) & (weights == gate)
    assert bool((gate.grad[before_last] == -1).all()) and bool((gate.grad[~before_last] == 0).all())


@torch.no_grad()
@pytest.mark.parametrize("halting", [PONDER, ACT])
def test_the_objective_of_a_batch_is_that_of_its_scored_positions_alone(
    write: Callable[..., Path], tmp_path: Path, halting: dict
) -> None:
    recipe = load_recipe(write(**SMALL, config=WITH_HEAD, halting=halting))
    run = training.Run(recipe, torch.device("cpu"), tmp_path)
    generator = torch.Generator().manual_seed(0)
    tokens, noise = torch.randint(256, (2, 7), generator=generator), torch.randn(2, 7, 16, generator=generator)
    targets = torch.where(torch.rand(2, 7, generator=generator) < 0.4, NOT_SCORED, tokens.flip(1))
    loss, predicted = objective(run.model, tokens, targets, noise, [5], recipe)
    context = DenseContext(7)
    states = list(unroll(run.model, 0, run.model.embed(tokens, context), noise, context, 5, 5))
    gate, values = torch.stack([run.model.gate(state) for state in states]), []
    for row, place in (targets != NOT_SCORED).nonzero().tolist():
        own = gate[:, row, place].tolist()
        if halting is PONDER:
            logits = [run.model.readout(state, context)[row, place] for state in states]
            losses = [-float(each.log_softmax(-1)[targets[row, place]]) for each in logits]
            values.append(slow_ponder(own, losses, beta=0.1, prior=0.3))
        else:
            values.append(0.1 * slow_act(own, 0.01)[1])
    if halting is ACT:
        shares = torch.tensor([[slow_act(gate[:, b, t].tolist(), 0.01)[0] for t in range(7)] for b in range(2)])  # [B, T, K]
        mean = sum(shares[..., k, None] * state for k, state in enumerate(states))
        log_p = run.model.readout(mean, context).log_softmax(-1)
        known = targets != NOT_SCORED
        values = [value - float(log_p[known][i, targets[known][i]]) for i, value in enumerate(values)]
    assert float(loss.detach()) == pytest.approx(sum(values) / len(values), rel=1e-5)
    assert predicted.shape == (2, 7)


@pytest.mark.parametrize("halting", [PONDER, ACT])
def test_gradients_reach_the_head_and_everything_else(write: Callable[..., Path], tmp_path: Path, halting: dict) -> None:
    recipe = load_recipe(write(**SMALL, config=WITH_HEAD, halting=halting))
    run = training.Run(recipe, torch.device("cpu"), tmp_path)
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    objective(run.model, tokens, tokens, torch.randn(2, 9, 16), [3], recipe)[0].backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in run.parameters.values())


def test_a_head_begins_at_odds_of_one_to_the_mean_and_is_trained_by_adamw(write: Callable[..., Path], tmp_path: Path) -> None:
    run = training.Run(load_recipe(write(**SMALL, config=WITH_HEAD, halting=PONDER)), torch.device("cpu"), tmp_path)
    assert float(run.model.gate(torch.zeros(16)).detach()) == pytest.approx(1 / 4)
    members = {id(p) for group in run.optimizers["adamw"].param_groups for p in group["params"]}
    assert {id(p) for name, p in run.parameters.items() if "halting_head" in name} <= members


@pytest.mark.parametrize("halting", [PONDER, ACT])
def test_a_run_that_stops_and_goes_on_is_the_run_that_did_not(
    write: Callable[..., Path], tmp_path: Path, halting: dict
) -> None:
    recipe = write(**SMALL, config=WITH_HEAD, halting=halting)
    whole = train(recipe, tmp_path / "whole", device="cpu")
    broken = tmp_path / "broken"
    broken.mkdir()
    run = training.Run(load_recipe(recipe), torch.device("cpu"), broken)
    run.step()
    run.step()
    run.save()
    assert (broken / CHECKPOINT).exists()
    train(recipe, broken, device="cpu")
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, broken))
    assert first.keys() == second.keys() and "halting_head.weight" in first
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_sweep_shows_gate_cdf_and_act_on_a_model_with_a_head_and_only_there(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    out = train(write(**SMALL, config=WITH_HEAD, halting=PONDER), tmp_path / "pondering", device="cpu")
    config = SweepConfig(
        models=(str(out),), benchmarks=("shell",), policies=("gate-cdf", "act", "kl"), limit=8, max_steps=6, execute=False,
        latency=LatencyConfig(enabled=False), plots=False,
    )  # fmt: skip
    points = load_run(sweep(config, out=tmp_path / "run")).points
    shown = points[(points["split"] == "test") & (points["subset"] == "all") & (points["status"] == "ok")]
    for policy in ("gate-cdf", "act"):
        mine = shown[shown["policy"] == policy].sort_values("threshold")
        assert mine["mean_depth"].is_monotonic_increasing and mine["mean_depth"].nunique() > 1
        assert f"random@{policy}" in set(shown["policy"])
    (out / "config.json").write_text(json.dumps(json.loads((out / "config.json").read_text()) | {"halting_head": False}))
    with pytest.raises(UserError, match="halting_head"):
        load_model(out)
    plain = train(write(**SMALL, config=CONFIG), tmp_path / "plain", device="cpu")
    assert "no halting gate" in plan_policy(find_policy("gate-cdf"), load_model(plain).spec, 6).not_applicable


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"halting": PONDER}, "give both or neither"),
        ({"config": WITH_HEAD}, "give both or neither"),
        ({"config": WITH_HEAD, "halting": {"kind": "ponders"}}, "halting"),
        ({"config": WITH_HEAD, "halting": {"kind": "act", "prior": 0.2}}, "halting.act.prior: Extra inputs"),
        (
            {"config": WITH_HEAD, "halting": {"kind": "ponder", "beta": math.inf}},
            "halting.ponder.beta: Input should be a finite",
        ),
    ],
)
def test_a_mistake_in_a_halting_recipe_is_one_line(write: Callable[..., Path], changes: dict, told: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(write(**changes))
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_head_that_the_checkpoint_lacks_and_a_value_that_is_none_are_refused(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    out = train(write(**SMALL), tmp_path / "plain", device="cpu")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"halting_head": True}))
    with pytest.raises(UserError, match=r"halting_head\.(weight|bias)"):
        load_model(out)
    (out / "config.json").write_text(json.dumps(config | {"halting_head": "linear"}))
    with pytest.raises(UserError, match="halting_head is 'linear'"):
        load_model(out)


@pytest.mark.parametrize("halting", [PONDER, ACT])
def test_a_family_without_a_head_cannot_be_trained_with_one(write: Callable[..., Path], tmp_path: Path, halting: dict) -> None:
    config = {
        "vocab_size": 256, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16,
        "max_position_embeddings": 128, "mean_recurrence": 3, "damping": 0.5, "norm_eps": 1e-6, "rope_theta": 1000.0,
    }  # fmt: skip
    recipe = write(**SMALL, family="self_transformer", config=config | {"halting_head": True}, halting=halting)
    with pytest.raises(UserError, match=f"'halting: {halting['kind']}' trains a head that no 'self_transformer' has"):
        train(recipe, tmp_path / "out", device="cpu")
