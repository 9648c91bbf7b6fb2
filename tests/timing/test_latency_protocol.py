"""Laws of the latency protocol, on a scripted clock."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halting_bench.errors import UserError
from halting_bench.timing.clock import FakeClock
from halting_bench.timing.protocol import Protocol, TimedPoint, balanced_orders, measure

QUIET = Protocol(min_runs=12, min_time_s=0.0, max_time_s=1e6, max_runs=100, warm_ups=1, noise_target=0.05)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def constant(clock: FakeClock, key: str, seconds: float = 1.0, tokens: int = 10) -> TimedPoint:
    return TimedPoint(key, clock.scripted(itertools.repeat(seconds), tokens))


def logged(clock: FakeClock, key: str, log: list[str], durations=None) -> TimedPoint:
    work = clock.scripted(durations or itertools.repeat(1.0))

    def run() -> int:
        log.append(key)
        return work()

    return TimedPoint(key, run)


@given(st.integers(1, 9), st.integers(0, 1000))
def test_in_a_square_everything_stands_equally_often_at_every_place_and_after_every_other(count, seed):
    rows = count if count % 2 == 0 else 2 * count
    square = list(itertools.islice(balanced_orders(count, np.random.default_rng(seed)), rows))
    for place in range(count):
        assert set(Counter(row[place] for row in square).values()) == {rows // count}
    pairs = Counter(pair for row in square for pair in itertools.pairwise(row))
    assert len(pairs) == count * (count - 1) and len(set(pairs.values())) <= 1


def test_orders_are_drawn_from_the_generator():
    first, again, other = (list(itertools.islice(balanced_orders(6, np.random.default_rng(s)), 6)) for s in (0, 0, 1))
    assert first == again != other


def test_the_first_runs_are_warm_ups_and_not_samples():
    clock = FakeClock()
    script = itertools.chain([100.0, 50.0], itertools.repeat(1.0))
    protocol = Protocol(min_runs=12, min_time_s=0.0, warm_ups=2)
    (timing,) = measure([TimedPoint("a", clock.scripted(script))], protocol, clock, rng())
    assert timing.samples_s == (1.0,) * 12


def test_points_are_interleaved_over_at_least_three_blocks_with_equal_runs():
    clock, log = FakeClock(), []
    timings = measure([logged(clock, key, log) for key in "abcd"], QUIET, clock, rng())
    timed = log[4:]
    assert all(set(timed[i : i + 4]) == set("abcd") for i in range(0, len(timed), 4))
    places = Counter((key, i % 4) for i, key in enumerate(timed))
    assert set(places.values()) == {3}  # three whole squares: perfectly balanced
    assert [t.sample_blocks for t in timings] == [(0,) * 4 + (1,) * 4 + (2,) * 4] * 4


def test_a_steady_point_stops_at_the_least_number_of_runs_and_is_not_noisy():
    clock = FakeClock()
    (timing,) = measure([constant(clock, "a")], QUIET, clock, rng())
    assert len(timing.samples_s) == 12 and timing.status == "ok" and not timing.noisy


def test_a_point_goes_on_until_it_has_run_for_the_least_time():
    clock = FakeClock()
    protocol = Protocol(min_runs=12, min_time_s=40.0, max_time_s=1e6)
    (timing,) = measure([constant(clock, "a")], protocol, clock, rng())
    assert len(timing.samples_s) == 40


def test_a_point_goes_on_until_its_median_is_known_and_leaves_the_others_alone():
    clock = FakeClock()
    spread = clock.scripted(itertools.chain([1.0] + [0.5, 1.5] * 6, itertools.repeat(1.0)))
    wild, steady = measure([TimedPoint("wild", spread), constant(clock, "steady")], QUIET, clock, rng())
    assert 12 < len(wild.samples_s) < 100 and not wild.noisy
    assert wild.seconds().relative_half_width <= QUIET.noise_target
    assert len(steady.samples_s) == 12


@pytest.mark.parametrize("cap", [{"max_runs": 30}, {"max_time_s": 30.0}])
def test_a_point_that_never_settles_ends_at_the_cap_and_is_flagged(cap):
    clock = FakeClock()
    protocol = Protocol(**{"min_runs": 12, "min_time_s": 0.0, "max_time_s": 1e6, **cap})
    (timing,) = measure([TimedPoint("a", clock.scripted(itertools.cycle([0.5, 1.5])))], protocol, clock, rng())
    assert timing.noisy and timing.status == "ok" and 30 <= len(timing.samples_s) <= 33


def test_a_failing_point_is_recorded_and_the_others_are_measured():
    clock = FakeClock()

    def broken() -> int:
        raise RuntimeError("out of memory\nand more")

    bad, good = measure([TimedPoint("bad", broken), constant(clock, "good")], QUIET, clock, rng())
    assert (bad.status, bad.error) == ("failed", "RuntimeError: out of memory")
    assert good.status == "ok" and len(good.samples_s) == 12


def test_a_point_that_fails_late_does_not_count_and_the_others_go_on():
    clock = FakeClock()
    work = clock.scripted([1.0] * 6)  # the seventh run finds no duration
    late, good = measure([TimedPoint("late", work), constant(clock, "good")], QUIET, clock, rng())
    assert late.status == "failed" and math.isnan(late.seconds().value) and len(late.samples_s) == 5
    assert good.status == "ok"


def test_a_run_whose_work_changes_is_a_failure():
    clock = FakeClock()
    tokens = itertools.count(1)
    (timing,) = measure([TimedPoint("a", lambda: next(tokens))], QUIET, clock, rng())
    assert timing.status == "failed" and "not fixed" in timing.error


def test_an_interrupt_is_not_swallowed():
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure([TimedPoint("a", interrupted)], QUIET, FakeClock(), rng())


def test_a_budget_takes_the_first_points_that_fit_and_skips_the_rest():
    clock = FakeClock()
    protocol = Protocol(min_runs=12, min_time_s=0.0, warm_ups=1, time_budget_s=30.0)
    timings = measure([constant(clock, key) for key in "abcd"], protocol, clock, rng())
    assert [t.status for t in timings] == ["ok", "ok", "skipped", "skipped"]
    assert "30 s" in timings[2].error and timings[3].samples_s == ()
    assert clock.now() <= 30.0


def test_a_budget_of_nothing_skips_everything_without_a_run():
    clock, log = FakeClock(), []
    protocol = Protocol(time_budget_s=0.0)
    timings = measure([logged(clock, key, log) for key in "ab"], protocol, clock, rng())
    assert [t.status for t in timings] == ["skipped", "skipped"] and log == []


def test_a_point_that_the_budget_cuts_short_is_skipped_with_its_samples_kept():
    clock = FakeClock()
    slowing = clock.scripted(itertools.chain([1.0], itertools.repeat(5.0)))
    protocol = Protocol(min_runs=12, min_time_s=0.0, warm_ups=1, time_budget_s=20.0)
    (timing,) = measure([TimedPoint("a", slowing)], protocol, clock, rng())
    assert timing.status == "skipped" and len(timing.samples_s) == 4
    assert math.isnan(timing.columns()["latency_ms_per_token"])


def test_a_point_that_has_enough_when_the_budget_ends_is_reported_as_noisy():
    clock = FakeClock()
    protocol = Protocol(min_runs=12, min_time_s=0.0, warm_ups=1, time_budget_s=20.0)
    (timing,) = measure([TimedPoint("a", clock.scripted(itertools.cycle([0.5, 1.5])))], protocol, clock, rng())
    assert timing.status == "ok" and timing.noisy


def test_the_columns_are_milliseconds_a_token():
    clock = FakeClock()
    (timing,) = measure([constant(clock, "a", seconds=0.5, tokens=10)], QUIET, clock, rng())
    columns = timing.columns()
    assert columns["latency_ms_per_token"] == columns["p10"] == columns["p90"] == pytest.approx(50.0)
    assert columns["tokens_per_s"] == pytest.approx(20.0)
    assert columns["samples_ms"] == [500.0] * 12 and columns["status"] == "ok"


@pytest.mark.parametrize(
    "wrong", [{"min_runs": 0}, {"noise_target": -1.0}, {"noise_target": math.nan}, {"time_budget_s": -1.0}]
)
def test_a_protocol_that_cannot_be_is_refused(wrong):
    with pytest.raises(UserError, match="type --"):
        Protocol(**wrong)
