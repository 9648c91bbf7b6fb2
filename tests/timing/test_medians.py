"""The median's interval is distribution-free and as wide as its confidence needs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from halting_bench.timing.medians import Interval, median


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=80), st.sampled_from([0.8, 0.95, 0.99]))
def test_the_interval_is_the_narrowest_symmetric_one_with_the_coverage(samples, confidence):
    estimate = median(samples, confidence)
    ordered, n = sorted(samples), len(samples)
    tails = [r for r in range(1, n // 2 + 1) if 2 * binom.cdf(r - 1, n, 0.5) <= 1 - confidence]
    assert estimate.value == pytest.approx(np.median(samples))
    if tails:
        assert (estimate.lo, estimate.hi) == (ordered[tails[-1] - 1], ordered[n - tails[-1]])
    else:
        assert math.isnan(estimate.lo) and math.isnan(estimate.hi)


def test_ten_samples_are_bounded_by_the_second_and_the_ninth():
    assert median(list(range(1, 11))) == Interval(5.5, 2.0, 9.0)


def test_five_samples_have_no_interval_at_95_percent():
    assert math.isnan(median([1.0, 2.0, 3.0, 4.0, 5.0]).relative_half_width)


def test_no_samples_have_no_median():
    assert math.isnan(median([]).value)


def test_the_relative_half_width_is_half_the_interval_over_the_median():
    assert Interval(10.0, 9.0, 12.0).relative_half_width == pytest.approx(0.15)
