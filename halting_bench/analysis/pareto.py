"""Which operating points are worth having: strict Pareto dominance on (mean depth, quality), fronts and hypervolume.

A point dominates another when it is at least as good on both axes and better on one. Points equal on both axes do not
dominate each other, so ties keep every label. A point with a NaN on either axis is on no front.

Shapes: N points.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

FRONT_KEYS = ("model", "benchmark", "metric", "subset", "evidence", "split", "seed")
"""The columns that must agree before two points may be compared."""


def front_mask(depth: np.ndarray, quality: np.ndarray, higher_is_better: bool) -> np.ndarray:
    """Marks the points that no other point dominates, in O(N log N).

    Args:
        depth: float [N], the cost; less is better.
        quality: float [N].
        higher_is_better: the direction of quality.

    Returns:
        bool [N].
    """
    gain = np.asarray(quality, dtype=np.float64) * (1.0 if higher_is_better else -1.0)
    depth = np.asarray(depth, dtype=np.float64)
    kept = np.flatnonzero(~(np.isnan(depth) | np.isnan(gain)))
    order = kept[np.lexsort((-gain[kept], depth[kept]))]
    first_of_depth = np.r_[True, np.diff(depth[order]) != 0][: len(order)]
    group = np.cumsum(first_of_depth) - 1
    best = gain[order][first_of_depth]  # of each distinct depth, ascending
    shallower = np.r_[-np.inf, np.maximum.accumulate(best)][: len(best)]
    # With nothing shallower even a gain of -inf is undominated.
    wins = best > shallower
    wins[:1] = True
    mask = np.zeros(len(gain), dtype=bool)
    mask[order] = wins[group] & (gain[order] == best[group])
    return mask


def hypervolume(depth: np.ndarray, quality: np.ndarray, higher_is_better: bool, reference: tuple[float, float]) -> float:
    """The area dominated by a set of points within a reference point (in core steps times the unit of quality).

    Args:
        depth: float [N].
        quality: float [N].
        higher_is_better: the direction of quality.
        reference: (depth, quality) of the worst corner, such as (max_steps, quality at depth 1). Points that are not
            better than it on both axes add nothing.

    Returns:
        The area; 0 when no point is better than the reference on both axes.
    """
    sign = 1.0 if higher_is_better else -1.0
    gain = sign * (np.asarray(quality, dtype=np.float64) - reference[1])
    depth = np.asarray(depth, dtype=np.float64)
    inside = (depth < reference[0]) & (gain > 0)
    depth, gain = depth[inside], gain[inside]
    order = np.lexsort((-gain, depth))
    width = np.diff(np.r_[depth[order], reference[0]])
    return float(np.sum(width * np.maximum.accumulate(gain[order]))) if len(order) else 0.0


def mark_fronts(points: "pd.DataFrame") -> "pd.Series":
    """Which rows of a `points` table lie on the front of their group (`FRONT_KEYS`); bool, aligned with its index.

    Only rows that ran take part, and of the controls only uniform depth: an oracle knows the answer and a random
    control has no rule that a deployment could follow.
    """
    import pandas as pd

    marks = pd.Series(False, index=points.index)
    policy = points["policy"].astype(str)
    eligible = points[(points["status"] == "ok") & ~policy.str.startswith(("oracle-", "random@"))]
    for _, group in eligible.groupby(list(FRONT_KEYS), dropna=False, sort=False):
        higher = bool(group["higher_is_better"].iloc[0])
        marks.loc[group.index] = front_mask(group["mean_depth"].to_numpy(), group["quality"].to_numpy(), higher)
    return marks
