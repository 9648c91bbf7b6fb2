"""Thresholds of an executed sweep, one a loop, from scores of a run in which nothing stopped.

Shapes: G operating points, P positions, N rows, L loops, R steps.
"""

import numpy as np

from halting_bench.engine.replay import Rule, exits_at, running_extremum, signed_threshold, unsigned_threshold

CLOSE = 1e-3
"""Scores this near to a threshold, relatively, may fall on either side of it by rounding."""


def depth_thresholds(scores: np.ndarray, rule: Rule, count: int) -> np.ndarray:
    """[count] thresholds at which rows that stop by this rule alone stop at evenly spaced mean depths.

    Args:
        scores: [N, R] of one loop at full depth.
        rule: the rule.
        count: how many.
    """
    steps = scores.shape[1]
    extremum = running_extremum(scores, rule)
    bounds = np.unique(extremum[np.isfinite(extremum)])
    if not count or not len(bounds):
        return np.empty(0)

    def mean_depth(bound: float) -> float:
        return float(np.minimum(exits_at(extremum, bound), steps).mean())

    deepest, shallowest = mean_depth(bounds[0]), mean_depth(np.inf)
    chosen = []
    for wanted in np.linspace(deepest, shallowest, count + 2)[1:-1]:
        low, high = 0, len(bounds) - 1  # a larger bound never stops later
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if mean_depth(bounds[middle]) <= wanted else (middle + 1, high)
        chosen.append(bounds[low])
    return unsigned_threshold(np.array(chosen), rule).astype(np.float64)


def never_fires(scores: np.ndarray, rule: Rule, thresholds: np.ndarray) -> np.ndarray:
    """Which points, bool [G], stop nothing: the rule holds nowhere, nor nearly, while nothing has stopped.

    Args:
        scores: [P, L, R] of every position, at full depth.
        rule: the rule.
        thresholds: [G, L].
    """
    never = np.ones(len(thresholds), bool)
    for loop in range(scores.shape[1]):
        least = running_extremum(scores[:, loop], rule).min()
        bounds = signed_threshold(thresholds[:, loop], rule, scores.dtype)
        never &= bounds + CLOSE * np.abs(bounds) < least
    return never
