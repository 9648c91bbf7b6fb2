"""Routers and a model's own halting head in the engine: replayed and executed as they run live, in float64."""

import numpy as np
import pytest
import torch
from runtime_models import STEPS, assert_same, by_reference, middling, texts, tiny_huginn

from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.huginn import Huginn
from halting_bench.benchmarks.base import Sequence
from halting_bench.engine.score import execute
from halting_bench.engine.trace import TracePlan, batch_noise, trace
from halting_bench.halting.policy import View, undefined_readout
from halting_bench.halting.routers import Router, RouterPolicy


def router_policy(kind: str, threshold: float = 0.5) -> RouterPolicy:
    weight = torch.randn(1, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bias = torch.full((1,), -0.7, dtype=torch.float64)
    return RouterPolicy(Router(kind, "gain", 2, "a hash", 0.4 * weight, bias), threshold)


@pytest.mark.parametrize("kv_mode", ["latest", "propagate", "absent"])
@pytest.mark.parametrize("kind", ["linear", "gate"])
def test_a_router_executes_as_the_masked_reference_does(kind: str, kv_mode: str) -> None:
    model, policy = tiny_huginn(), router_policy(kind, 0.7 if kind == "gate" else 0.5)
    executed = execute(model, texts(), policy, max_steps=STEPS, kv_mode=kv_mode)
    assert len(set(executed.exit_step)) > 2
    assert_same(executed, by_reference(model, texts(), policy, kv_mode=kv_mode))


@pytest.mark.parametrize("kind", ["linear", "gate"])
def test_a_router_that_rides_along_stops_where_it_would_stop_live(kind: str) -> None:
    model, policy = tiny_huginn(), router_policy(kind, 0.7 if kind == "gate" else 0.5)
    shard = trace(model, texts(), TracePlan((), STEPS, 0, opaque={"router": policy}))
    live = np.concatenate([exits_of(model, text, policy) for text in texts()])
    np.testing.assert_array_equal(shard["exit/router"], live)
    assert len(set(live)) > 2


def exits_of(model: RecurrentModel, text: Sequence, policy: RouterPolicy) -> np.ndarray:
    """Where each position of one text would stop while all run on: the states of the plain trajectory, a row at a time."""
    states = orbit(model, text)
    found = []
    for row in range(len(text.tokens)):
        view = [View(torch.tensor([k]), s[row : row + 1], undefined_readout) for k, s in enumerate(states)]
        memory, exit_step = policy.init(view[0]), STEPS + 1
        for k in range(1, STEPS + 1):
            verdict, memory = policy.step(view[k], memory)
            if bool(verdict.halt):
                exit_step = k
                break
        found.append(exit_step)
    return np.array(found)


@torch.no_grad()
def orbit(model: RecurrentModel, text: Sequence) -> list[torch.Tensor]:
    context = DenseContext(len(text.tokens))
    x = model.embed(torch.from_numpy(text.tokens)[None], context)
    states = [model.begin(0, x, batch_noise(model, [text], len(text.tokens), 0))]
    for _ in range(STEPS):
        states.append(model.step(0, states[-1], x, context))
    return [state[0] for state in states]


def with_head() -> Huginn:
    """The tiny model with a halting head of random weights."""
    model = tiny_huginn(head=True)
    head = {"halting_head.weight": torch.linspace(-0.5, 0.5, 16)[None], "halting_head.bias": torch.tensor([-1.0])}
    model.load_state_dict(tiny_huginn().state_dict() | head)
    return model


@pytest.mark.parametrize("signal", ["gate-cdf", "act"])
@pytest.mark.parametrize("kv_mode", ["latest", "propagate"])
def test_a_halting_head_executes_as_the_masked_reference_does(signal: str, kv_mode: str) -> None:
    model = with_head()
    policy = middling(model, signal)
    executed = execute(model, texts(), policy, max_steps=STEPS, kv_mode=kv_mode)
    assert len(set(executed.exit_step)) > 2
    assert_same(executed, by_reference(model, texts(), policy, kv_mode=kv_mode))


def test_a_halting_head_changes_nothing_else() -> None:
    tokens = torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(with_head()(tokens, 3), tiny_huginn()(tokens, 3))
