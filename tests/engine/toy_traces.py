"""Toy models, sequences, and what a policy does in a plain live loop: the slow, obvious form of a replay.

Shapes: N scored rows, T positions of a sequence, R steps.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from halting_bench import catalog
from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.noise import initial_noise
from halting_bench.architectures.toy import toy_model
from halting_bench.benchmarks.base import NOT_SCORED, Sequence
from halting_bench.engine.trace import Shard, TracePlan, trace
from halting_bench.halting.policy import HaltingPolicy, View
from halting_bench.halting.signals import SIGNALS
from halting_bench.plan import PolicyPlan, plan_policy

STEPS = {"huginn": 8, "ouro": 6}
SEED = 3


@lru_cache
def toy(name: str) -> RecurrentModel:
    return toy_model(name, dtype=torch.float64)


def signals(name: str) -> tuple[str, ...]:
    """Those that the model can give."""
    return tuple(s for s, signal in SIGNALS.items() if toy(name).spec.has_gate or not signal.needs_gate)


def sequences(count: int = 5, seed: int = 0) -> list[Sequence]:
    """Of different lengths, some positions not scored, one or two sequences a document."""
    rng, found = np.random.default_rng(seed), []
    for i in range(count):
        length = int(rng.integers(4, 10))
        targets = np.where(rng.random(length) < 0.3, NOT_SCORED, rng.integers(0, 256, length))
        codes = {"parity": np.where(targets == NOT_SCORED, -1, targets % 2).astype(np.int16)}
        found.append(Sequence(10 + i // 2, 500 + i, rng.integers(0, 256, length), targets, codes))
    return found


@lru_cache
def whole_trace(name: str) -> Shard:
    """Every signal of the toy on the default sequences. Not to be written to."""
    return trace(toy(name), sequences(), TracePlan(signals(name), STEPS[name], SEED))


def plan(model: str, recipe: str) -> PolicyPlan:
    return plan_policy(catalog.find_policy(recipe), toy(model).spec, STEPS[model])


def applicable() -> list[tuple[str, str]]:
    """(model, recipe) of every recipe that applies to the toy."""
    return [(m, r) for m in STEPS for r in catalog.policy_names() if not plan(m, r).not_applicable]


def free_signal(planned: PolicyPlan) -> str:
    """The signal that the grid's threshold is for."""
    if planned.combination is None:
        return planned.rules()[0].signal
    return planned.rules()[planned.combination.thresholds.index(None)].signal


@dataclass(frozen=True)
class Live:
    """exits: [N], R + 1 for never; loss: [N] nats at the exit (at R for never)."""

    exits: np.ndarray
    loss: np.ndarray


@torch.inference_mode()
def live(model: RecurrentModel, texts: list[Sequence], policy: HaltingPolicy, steps: int, seed: int = SEED) -> Live:
    """Steps the policy on one sequence at a time; a row that halts keeps its readout, and all rows run on."""
    exits, losses = [], []
    for text in texts:
        length = len(text.tokens)
        context = DenseContext(length)
        x = model.embed(torch.from_numpy(text.tokens)[None], context)
        noise = initial_noise(seed, np.full((1, 1), text.uid), np.arange(length)[None], model.spec.width)
        state = model.begin(0, x, noise if model.spec.loops[0].random_start else None)

        def view(k: int, state: torch.Tensor = state, context: DenseContext = context, length: int = length) -> View:
            gate = (lambda: model.gate(state)[0]) if model.spec.has_gate else None
            return View(
                torch.full((length,), k), state[0], lambda: model.readout(model.end(0, state, context), context)[0], gate
            )

        memory = policy.init(view(0))
        own = np.full(length, steps + 1)
        loss = np.empty(length)
        for k in range(1, steps + 1):
            state = model.step(0, state, x, context)
            here = view(k, state)
            verdict, memory = policy.step(here, memory)
            log_p = torch.log_softmax(here.logits(), dim=-1).numpy()
            now = -log_p[np.arange(length), np.maximum(text.targets, 0)]
            halting = verdict.halt.numpy() & (own > steps)
            own[halting], loss[halting] = k, now[halting]
        loss[own > steps] = now[own > steps]
        scored = text.targets != NOT_SCORED
        exits.append(own[scored])
        losses.append(loss[scored])
    return Live(np.concatenate(exits), np.concatenate(losses))


def between_scores(scores: np.ndarray, shares: tuple[float, ...]) -> list[float]:
    """Thresholds midway between neighbouring observed scores, so that rounding decides nothing."""
    seen = np.unique(scores[np.isfinite(scores)])
    places = [min(int(share * len(seen)), len(seen) - 2) for share in shares]
    return [float(seen[i] / 2 + seen[i + 1] / 2) for i in places]
