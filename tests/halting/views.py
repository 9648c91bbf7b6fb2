"""Views of made-up trajectories: what a policy would see of a model, without one.

Shapes: K steps, R rows, D width, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halting_bench.halting.policy import HaltingPolicy, State, View, take_rows
from halting_bench.halting.routers import INPUTS, Router


@dataclass(frozen=True)
class Trajectory:
    """latent: [K + 1, R, D], s_0 first; logits: [K + 1, R, V], the first never read; gate: [K + 1, R] in (0, 1)."""

    latent: Tensor
    logits: Tensor
    gate: Tensor

    def view(self, k: int, rows: Tensor) -> View:
        def logits() -> Tensor:
            assert k > 0, "a readout of the initial state is not defined"
            return self.logits[k, rows]

        return View(torch.full((len(rows),), k), self.latent[k, rows], logits, lambda: self.gate[k, rows])

    @property
    def rows(self) -> int:
        return self.latent.shape[1]

    @property
    def steps(self) -> int:
        return len(self.latent) - 1


def settling(rows: int = 6, steps: int = 9, width: int = 5, vocab: int = 7, seed: int = 0) -> Trajectory:
    """Rows that settle at different speeds, with logits that are a function of the latent."""
    rng = np.random.default_rng(seed)
    pace = rng.uniform(0.3, 0.95, size=(1, rows, 1)) ** np.arange(steps + 1)[:, None, None]
    latent = rng.normal(size=(1, rows, width)) + pace * rng.normal(size=(steps + 1, rows, width))
    logits = 3 * latent @ rng.normal(size=(width, vocab))
    return Trajectory(*(torch.from_numpy(a) for a in (latent, logits, rng.uniform(0.02, 0.6, size=(steps + 1, rows)))))


def random_router(kind: str, width: int = 5, first: int = 2, inputs: str = "latent") -> Router:
    """A linear router or a gate that knows nothing; its probabilities lie about .05 to .5."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1, width + len(INPUTS[inputs]), generator=generator, dtype=torch.float64)
    bias = torch.full((1,), -1.5, dtype=torch.float64)
    return Router(kind, "gain", first, "a hash", 0.5 * weight, bias, inputs=inputs)


def run(policy: HaltingPolicy, seen: Trajectory, rows: Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Steps a policy without ever stopping. Returns halts bool [K, R'] and scores [K, R']."""
    rows = torch.arange(seen.rows) if rows is None else rows
    state = policy.init(seen.view(0, rows))
    verdicts = []
    for k in range(1, seen.steps + 1):
        verdict, state = policy.step(seen.view(k, rows), state)
        verdicts.append(verdict)
    return np.stack([v.halt.numpy() for v in verdicts]), np.stack([v.score.numpy() for v in verdicts])


def run_compacted(policy: HaltingPolicy, seen: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """First exits [R] (K + 1: never) and the score there (else NaN), rows being dropped as they halt."""
    alive = torch.arange(seen.rows)
    exits, scores = np.full(seen.rows, seen.steps + 1), np.full(seen.rows, np.nan)
    state: State = policy.init(seen.view(0, alive))
    for k in range(1, seen.steps + 1):
        verdict, state = policy.step(seen.view(k, alive), state)
        exits[alive[verdict.halt]] = k
        scores[alive[verdict.halt]] = verdict.score[verdict.halt]
        alive, state = alive[~verdict.halt], take_rows(state, ~verdict.halt)
    return exits, scores
