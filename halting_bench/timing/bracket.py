"""What of the ideal saving a policy turns into seconds: the policy between two uniform depths.

(i) uniform depth R, the cap; (ii) uniform depth equal to the policy's mean depth, interpolated between its neighbours, which
is what the policy would take if acting on it cost nothing; (iii) the policy. Speed-ups are against uniform depth at the
trained mean. Intervals hold at `confidence` for each figure as a whole (Bonferroni over the medians that it is made of).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halting_bench.timing.medians import Interval
from halting_bench.timing.protocol import Timing

NO_ROOM = 0.9
"""Above this share of R the mean depth leaves so small a denominator that a realised fraction would be noise."""


@dataclass(frozen=True)
class Bracket:
    """A policy's seconds beside those of uniform depth. NaN where a timing that it needs is missing."""

    speedup: Interval  # trained mean / policy
    speedup_ideal: Interval  # trained mean / uniform at the mean depth
    realised_fraction: Interval


def neighbours(mean_depth: float) -> tuple[int, int]:
    """The uniform depths around a mean depth: equal where it is whole."""
    return math.floor(mean_depth), math.ceil(mean_depth)


def bracket(
    *,
    mean_depth: float,
    max_steps: int,
    full: Timing,
    below: Timing,
    above: Timing,
    policy: Timing,
    trained: Timing,
    confidence: float = 0.95,
) -> Bracket:
    """Reads the bracket of one policy from timings of the same tokens.

    Args:
        mean_depth: of the policy's executed run, core applications a token.
        max_steps: R.
        full: uniform depth R.
        below, above: uniform depth at the `neighbours` of mean_depth.
        policy: the policy, executed.
        trained: uniform depth at the trained mean.
        confidence: of each interval.

    Raises:
        ValueError: the timings are of different numbers of tokens.
    """
    if len({t.tokens for t in (full, below, above, policy, trained) if t.status == "ok"}) > 1:
        raise ValueError("the timings of a bracket must process the same tokens")
    weight = mean_depth - math.floor(mean_depth)

    def uniform(below_s: float, above_s: float) -> float:
        return (1 - weight) * below_s + weight * above_s

    def realised(full_s: float, below_s: float, above_s: float, policy_s: float) -> float:
        return _ratio(full_s - policy_s, full_s - uniform(below_s, above_s))

    room = mean_depth <= NO_ROOM * max_steps
    return Bracket(
        speedup=ratio(trained, policy, confidence),
        speedup_ideal=_propagate(lambda t, b, a: _ratio(t, uniform(b, a)), (trained, below, above), confidence),
        realised_fraction=_propagate(realised, (full, below, above, policy), confidence) if room else Interval(),
    )


def ratio(over: Timing, under: Timing, confidence: float = 0.95) -> Interval:
    """Median seconds of one over those of the other: above 1, the second is faster. Of A against A it tells the noise."""
    return _propagate(_ratio, (over, under), confidence)


def _ratio(over: float, under: float) -> float:
    """NaN unless the denominator is positive: the seconds saved, or spent, that a fraction refers to must exist."""
    return over / under if under > 0 else math.nan


def _propagate(figure: Callable[..., float], timings: Sequence[Timing], confidence: float) -> Interval:
    """A figure of medians, and its extremes over the box of their intervals.

    The figures here are monotone in each median while the denominator keeps its sign, so the extremes are at corners.
    """
    medians = [timing.seconds(1 - (1 - confidence) / len(timings)) for timing in timings]
    corners = [figure(*corner) for corner in itertools.product(*((m.lo, m.hi) for m in medians))]
    value = figure(*(m.value for m in medians))
    if any(map(math.isnan, corners)):
        return Interval(value)
    return Interval(value, min(corners), max(corners))
