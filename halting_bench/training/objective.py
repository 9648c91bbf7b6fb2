"""What one training step computes: a random number of loops, back-propagation through the last of them, and the loss.

Shapes: B sequences, T positions, D width, V vocabulary.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from halting_bench.architectures.attention import AttentionContext, DenseContext
from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.base import NOT_SCORED
from halting_bench.training.halting import act_weights, ponder_loss
from halting_bench.training.recipe import Act, Ponder, Recipe


def draw_depth(recipe: Recipe, rng: np.random.Generator) -> int:
    """Steps of one loop, 1..cap."""
    depth = recipe.depth
    if rng.random() < depth.long:
        return int(rng.integers(round(depth.mean), depth.cap + 1))
    rate = math.exp(rng.normal(math.log(depth.mean) - depth.sigma**2 / 2, depth.sigma))
    return min(int(rng.poisson(rate)) + 1, depth.cap)


def unroll(
    model: RecurrentModel, loop: int, x: Tensor, noise: Tensor, context: AttentionContext, depth: int, backprop: int
) -> Iterator[Tensor]:
    """States s_1 .. s_depth of a loop, [B, T, D], of which the last `backprop` keep their graph. x, noise: [B, T, D]."""
    state = model.begin(loop, x, noise)
    for k in range(depth):
        with torch.set_grad_enabled(k >= depth - backprop):
            state = model.step(loop, state, x, context)
        yield state


def forward(model: RecurrentModel, tokens: Tensor, noise: Tensor, depths: list[int], backprop: int) -> Tensor:
    """Logits [B, T, V] after so many steps of each loop. tokens: int64 [B, T]; noise: [B, T, D]."""
    context = DenseContext(tokens.shape[1], causal=model.spec.causal, device=tokens.device)
    x = model.embed(tokens, context)
    for loop, depth in enumerate(depths):
        *_, last = unroll(model, loop, x, noise, context, depth, backprop)
        x = model.end(loop, last, context)
    return model.readout(x, context)


def objective(
    model: RecurrentModel, tokens: Tensor, targets: Tensor, noise: Tensor, depths: list[int], recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """(loss, predictions) of one batch: what the recipe minimises, and the argmax at the drawn depth, int64 [B, T].

    Without a halting head that is the mean cross-entropy at the drawn depth, in nats.

    Args:
        tokens, targets: int64 [B, T]; a target is NOT_SCORED where none.
        noise: [B, T, D] initial states.
        depths: of each loop.
    """
    if recipe.halting is None:
        logits = forward(model, tokens, noise, depths, recipe.depth.backprop)
        return _cross_entropy(logits, targets), logits.argmax(-1)
    context = DenseContext(tokens.shape[1], causal=model.spec.causal, device=tokens.device)
    x, (depth,) = model.embed(tokens, context), depths
    states = torch.stack(list(unroll(model, 0, x, noise, context, depth, recipe.depth.backprop)))  # [K, B, T, D]
    if isinstance(recipe.halting, Ponder):
        return _ponder(model, states, targets, context, recipe.halting)
    return _act(model, states, targets, context, recipe.halting)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=NOT_SCORED)


def _ponder(
    model: RecurrentModel, states: Tensor, targets: Tensor, context: AttentionContext, rule: Ponder
) -> tuple[Tensor, Tensor]:
    """PonderNet: every step is read out, those before the back-propagated ones for coda, head and gate alone."""
    logits = model.readout(model.end(0, states.flatten(0, 1), context), context).unflatten(0, states.shape[:2])
    scored = targets != NOT_SCORED
    wanted = targets[scored].expand(len(states), -1)
    losses = F.cross_entropy(logits[:, scored].float().flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)
    loss = ponder_loss(model.gate(states)[:, scored], losses, beta=rule.beta, prior=rule.prior)
    return loss, logits[-1].argmax(-1)


def _act(model: RecurrentModel, states: Tensor, targets: Tensor, context: AttentionContext, rule: Act) -> tuple[Tensor, Tensor]:
    """ACT: the halting-weighted mean of the states is read out; each scored position pays for its steps."""
    weights, cost = act_weights(model.gate(states), rule.epsilon)
    mean = (weights.to(states).unsqueeze(-1) * states).sum(0)
    logits = model.readout(model.end(0, mean, context), context)
    return _cross_entropy(logits, targets) + rule.tau * cost[targets != NOT_SCORED].mean(), logits.argmax(-1)
