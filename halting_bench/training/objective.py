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
from halting_bench.training.recipe import Recipe


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
    """(loss, predictions) of one batch: mean cross-entropy in nats at the drawn depth, and the argmax there, int64 [B, T].

    Args:
        tokens, targets: int64 [B, T]; a target is NOT_SCORED where none.
        noise: [B, T, D] initial states.
        depths: of each loop.
    """
    logits = forward(model, tokens, noise, depths, recipe.depth.backprop)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=NOT_SCORED)
    return loss, logits.argmax(-1)
