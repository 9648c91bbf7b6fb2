"""The controls of every sweep: the uniform-depth curve, oracles, and random exits. Imports no torch.

Shapes: N rows, R steps, G points, M documents.
"""

import numpy as np

from halting_bench.engine.points import ExitSource, TracedUnit
from halting_bench.engine.replay import Combination
from halting_bench.errors import PolicyFailed
from halting_bench.store import Arrays

ORACLE_PRICES = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Prices lambda of one step, in nats: the oracle's exit is argmin_k(loss_k + lambda k)."""


def fixed_exits(steps: int) -> ExitSource:
    """Uniform depths 1..R."""

    def exits(number: int, shard: Arrays) -> np.ndarray:
        return np.repeat(np.arange(1, steps + 1)[:, None], len(shard["document"]), axis=1)

    return exits


def oracle_exits(chooser: TracedUnit | None) -> ExitSource:
    """argmin_k(loss_k + lambda k) for each price.

    Args:
        chooser: the same documents traced with another seed's initial states. A minimum over noise flatters itself;
            exits chosen on one draw and scored on another do not. None: the same draw, an optimistic bound.
    """

    def exits(number: int, shard: Arrays) -> np.ndarray:
        loss = (shard if chooser is None else chooser.shards[number])["loss"].astype(np.float64)
        loss = np.where(np.isnan(loss), np.inf, loss)
        step = np.arange(1, loss.shape[1] + 1)
        return np.stack([np.argmin(loss + price * step, axis=1) + 1 for price in ORACLE_PRICES])

    return exits


def saturation_exits(number: int, shard: Arrays) -> np.ndarray:
    """The first step from which the argmax never changes again, [1, N]."""
    return shard["saturation"].astype(np.int64)[None]


def opaque_exits(keys: list[str]) -> ExitSource:
    """The first exits that policies recorded while they rode along in the trace. Raises PolicyFailed for one that raised."""

    def exits(number: int, shard: Arrays) -> np.ndarray:
        for key in keys:
            if f"error/{key}" in shard.names:
                raise PolicyFailed(shard[f"error/{key}"].tobytes().decode())
        return np.stack([shard[f"exit/{key}"].astype(np.int64) for key in keys])

    return exits


def combined_exits(combination: Combination, thresholds: list[float]) -> ExitSource:
    """Exits of several rules together, from their recorded scores."""

    def exits(number: int, shard: Arrays) -> np.ndarray:
        return np.stack([combination.exits(lambda signal: shard[f"score/{signal}"], threshold) for threshold in thresholds])

    return exits


def random_sums(histogram: np.ndarray, uniform: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Exits drawn at random from a policy's own depth histogram: the exact expectation, without sampling.

    Args:
        histogram: [G, R] rows that stopped at each step.
        uniform: [R, M] summed outcome of each document at each uniform depth.
        counts: [M] tokens a document.

    Returns:
        expected summed outcome [G, M] and summed depth [G, M].
    """
    share = histogram / histogram.sum(axis=1, keepdims=True)
    return share @ uniform, (share @ np.arange(1, histogram.shape[1] + 1))[:, None] * counts


def uniform_at(depth: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """The uniform curve at fractional depths, linear between integers: depth [G] -> summed outcome [G, M]."""
    low = np.clip(np.floor(depth).astype(int), 1, len(uniform))
    high = np.minimum(low + 1, len(uniform))
    part = (np.clip(depth, 1, len(uniform)) - low)[:, None]
    return (1 - part) * uniform[low - 1] + part * uniform[high - 1]
