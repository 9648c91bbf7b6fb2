"""Ouro against numbers of the public implementation (float32, rtol = atol = 1e-5; exits exactly)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.load import load_model
from halting_bench.halting.policies import ThresholdPolicy
from halting_bench.halting.policy import View

FOLDER = Path(__file__).parents[1] / "golden" / "ouro"


@pytest.fixture(scope="module")
def run():
    """(golden tensors, states [4, B, T, D], logits [4, B, T, V], gates [4, B, T])."""
    golden, model = load_file(FOLDER / "golden.safetensors"), load_model(FOLDER)
    context = DenseContext(golden["input_ids"].shape[1])
    x = model.embed(golden["input_ids"], context)
    state, states, logits, gates = model.begin(0, x, None), [], [], []
    for _ in range(model.spec.mean_recurrence):
        state = model.step(0, state, x, context)
        states.append(state)
        logits.append(model.readout(model.end(0, state, context), context))
        gates.append(model.gate(state))
    return golden, torch.stack(states), torch.stack(logits), torch.stack(gates)


def test_states_logits_and_gates_of_every_loop(run):
    golden, states, logits, gates = run
    torch.testing.assert_close(states, golden["states"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, golden["logits"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gates, golden["gate_logits"].sigmoid(), rtol=1e-5, atol=1e-5)


def test_the_plain_forward_is_the_last_loop(run):
    golden, _, logits, _ = run
    assert torch.equal(load_model(FOLDER)(golden["input_ids"], 4), logits[-1])


@pytest.mark.parametrize("q", [0.3, 0.5, 0.7, 0.9])
def test_the_gate_cdf_policy_exits_where_the_reference_does(run, q):
    golden, states, logits, gates = run
    loops, rows = len(states), states[0].flatten(0, 1).shape[0]

    def view(k):
        latent = states[max(k, 1) - 1].flatten(0, 1)
        return View(torch.full((rows,), k), latent, lambda: logits[k - 1].flatten(0, 1), gate=lambda: gates[k - 1].flatten())

    policy = ThresholdPolicy("gate-cdf", q)
    memory, exits = policy.init(view(0)), torch.full((rows,), loops)  # the last loop takes what is left
    for k in range(1, loops + 1):
        verdict, memory = policy.step(view(k), memory)
        exits = torch.where(verdict.halt & (exits > k), k, exits)
    exits = exits.view_as(golden["input_ids"])
    assert torch.equal(exits, golden[f"exit_step_at_{q}"])
    chosen = logits.gather(0, (exits - 1)[None, :, :, None].expand(1, *logits.shape[1:]))[0]
    torch.testing.assert_close(chosen, golden[f"logits_exit_at_{q}"], rtol=1e-5, atol=1e-5)


def test_the_weighted_exit_is_the_mean_under_the_gate_s_distribution(run):
    golden, _, _, _ = run
    stay = (1 - golden["gate_logits"].double().sigmoid()).cumprod(0)
    reached = torch.cat((torch.ones_like(stay[:1]), stay[:-1]))
    share = torch.cat((reached[:-1] - stay[:-1], reached[-1:]))
    torch.testing.assert_close(share.sum(0), torch.ones_like(share[0]))
    expected = (share[..., None] * golden["logits"].double()).sum(0)
    actual = load_model(FOLDER).weighted_exit(golden["input_ids"])
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_exits_of_the_goldens_differ_by_threshold(run):
    depths = [run[0][f"exit_step_at_{q}"].double().mean().item() for q in (0.3, 0.5, 0.7, 0.9)]
    assert depths == sorted(depths) and depths[0] < depths[-1]


def test_a_saturated_gate_stays_below_one_in_bfloat16():
    model = load_model(FOLDER, dtype=torch.bfloat16)
    state = torch.zeros(1, model.spec.width, dtype=torch.bfloat16)
    model.model["early_exit_gate"].bias.fill_(7.0)
    assert model.gate(state).dtype == torch.float32
    assert model.gate(state).item() < 1.0
