"""Medians of raw samples and their distribution-free intervals: a mean hides what latency is made of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """An estimate and where it may lie; NaN where there is none."""

    value: float = math.nan
    lo: float = math.nan
    hi: float = math.nan

    @property
    def relative_half_width(self) -> float:
        """Half the interval's width over the estimate; NaN when there is no interval."""
        return (self.hi - self.lo) / (2 * self.value) if self.value else math.nan


def median(samples: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median, and two order statistics that enclose the true one with at least `confidence`, whatever the distribution.

    Of n independent samples fewer than r lie below the true median with probability P(Binomial(n, 1/2) < r); the interval
    is [x_(r), x_(n+1-r)] for the largest r at which both tails together leave enough (Hahn and Meeker, Statistical
    Intervals, 5.2). Too few samples (under 6 at 95 %) have no interval.
    """
    from scipy.stats import binom

    if not samples:
        return Interval()
    ordered = np.sort(samples)
    rank = int(binom.ppf((1 - confidence) / 2, len(ordered), 0.5))
    value = float(np.median(ordered))
    return Interval(value, float(ordered[rank - 1]), float(ordered[-rank])) if rank else Interval(value)
