"""The bracket's figures, from timings with known medians."""

import math

import pytest

from halting_bench.timing.bracket import bracket, neighbours, ratio
from halting_bench.timing.protocol import Timing


def timing(seconds: float, spread: float = 0.0, tokens: int = 100, status: str = "ok") -> Timing:
    samples = tuple(seconds * (1 + spread * offset) for offset in (-1, -1, -0.5, -0.5, 0, 0, 0, 0.5, 0.5, 1, 1))
    return Timing("t", status, tokens=tokens, samples_s=samples, sample_blocks=(0,) * len(samples))


def read(policy: float, mean_depth: float = 8.5, spread: float = 0.0, **replaced: Timing):
    timings = {
        "full": timing(18.0, spread),
        "below": timing(10.0, spread),
        "above": timing(11.0, spread),
        "trained": timing(14.0, spread),
        "policy": timing(policy, spread),
    }
    return bracket(mean_depth=mean_depth, max_steps=16, **{**timings, **replaced})


@pytest.mark.parametrize(("policy", "expected"), [(10.5, 1.0), (18.0, 0.0), (12.0, 0.8), (21.75, -0.5)])
def test_the_realised_fraction_is_one_at_the_interpolated_depth_and_zero_at_the_cap(policy, expected):
    assert read(policy).realised_fraction.value == pytest.approx(expected)


def test_speedups_are_against_the_trained_mean():
    figures = read(12.0)
    assert figures.speedup.value == pytest.approx(14 / 12)
    assert figures.speedup_ideal.value == pytest.approx(14 / 10.5)


def test_a_mean_depth_near_the_cap_has_no_realised_fraction_but_a_speedup():
    figures = read(12.0, mean_depth=14.5)
    assert math.isnan(figures.realised_fraction.value) and figures.speedup.value == pytest.approx(14 / 12)
    assert read(12.0, mean_depth=14.4).realised_fraction.value == pytest.approx(6 / (18 - 10.4))


def test_steady_timings_have_intervals_of_no_width_and_spread_ones_enclose_the_figure():
    steady = read(12.0)
    assert steady.speedup.lo == steady.speedup.hi == steady.speedup.value
    wide = read(12.0, spread=0.02)
    for figure in (wide.speedup, wide.speedup_ideal, wide.realised_fraction):
        assert figure.lo < figure.value < figure.hi


def test_a_missing_timing_leaves_only_the_figures_that_need_it_without_a_number():
    figures = read(12.0, below=timing(10.0, status="skipped"))
    assert math.isnan(figures.realised_fraction.value) and math.isnan(figures.speedup_ideal.value)
    assert figures.speedup.value == pytest.approx(14 / 12)


def test_a_cap_that_is_no_slower_than_the_mean_depth_has_no_realised_fraction():
    assert math.isnan(read(12.0, full=timing(10.0)).realised_fraction.value)


def test_timings_of_different_work_are_not_compared():
    with pytest.raises(ValueError, match="same tokens"):
        read(12.0, full=timing(18.0, tokens=99))


def test_a_point_against_itself_is_one():
    assert ratio(timing(3.0), timing(3.0)).value == 1.0


def test_the_neighbours_of_a_whole_depth_are_itself():
    assert neighbours(8.0) == (8, 8) and neighbours(8.2) == (8, 9)
