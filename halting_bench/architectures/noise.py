"""Seeded initial states: a pure function of (seed, sequence, position, feature).

A sequential generator would make s_0 depend on batch size, order and device; a counter-based one cannot.
"""

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser (Steele, Lea and Flood, 2014): a bijection of 64-bit words with full avalanche."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def initial_noise(seed: int, sequences: np.ndarray, positions: np.ndarray, width: int) -> Tensor:
    """Standard normal noise truncated at 3 sigma.

    Args:
        seed: the run's seed.
        sequences: integer ids, broadcastable with `positions` to shape [*].
        positions: 0-based positions in the sequence.
        width: D.

    Returns:
        float64 [*, D] on the CPU: the same numbers for the same (seed, sequence, position, feature), always.
    """
    from scipy.special import ndtr, ndtri

    with np.errstate(over="ignore"):  # 64-bit wrap-around is the arithmetic meant
        key = _mix(np.asarray(seed, np.uint64) * _GOLDEN + np.asarray(sequences).astype(np.uint64))
        key = _mix(key * _GOLDEN + np.asarray(positions).astype(np.uint64))
        words = _mix(key[..., None] + (np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN))
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    low = ndtr(-3.0)
    return torch.from_numpy(ndtri(low + uniform * (1.0 - 2.0 * low)))
