"""The exact curve over all thresholds against brute force, in memory and merged from many shards."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from toy_traces import STEPS, signals, whole_trace

from halting_bench.engine import curve
from halting_bench.engine.curve import CurveBuilder, between, fastest_at, sample_curve
from halting_bench.engine.replay import Rule, exits_at, running_extremum
from halting_bench.halting.signals import SIGNALS


def build(extremum: np.ndarray, outcome: np.ndarray, shards: int = 1) -> tuple[CurveBuilder, TemporaryDirectory]:
    folder = TemporaryDirectory()
    builder = CurveBuilder(Path(folder.name))
    for part in np.array_split(np.arange(len(extremum)), shards):
        builder.add(extremum[part], outcome[part])
    return builder, folder


def brute(extremum: np.ndarray, outcome: np.ndarray, bound: float) -> tuple[float, float]:
    """Mean depth and mean outcome at one signed threshold."""
    stop = np.minimum(exits_at(extremum, bound), extremum.shape[1])
    return float(stop.mean()), float(outcome[np.arange(len(stop)), stop - 1].mean())


def at(builder: CurveBuilder, steps: int, bound: float) -> tuple[float, float]:
    """The same, read off the curve: everything whose extremum lies below the bound has fired."""
    saved, quality = 0, 0.0
    for chunk in builder.chunks():
        place = np.searchsorted(chunk.extremum, bound, side="left")
        if place:
            saved, quality = int(chunk.saved_steps[place - 1]), float(chunk.quality_change[place - 1])
    return steps - saved / builder.rows, (builder.full_quality + quality) / builder.rows


SCORES = st.one_of(st.sampled_from([0.0, -0.0, 1.0, 2.0, np.nan, np.inf, -np.inf]), st.floats(-3, 3, width=32))


@st.composite
def cases(draw):
    n, steps = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    scores = draw(arrays(np.float64, (n, steps), elements=SCORES)).astype(dtype)
    rule = Rule(
        "any", draw(st.sampled_from(["below", "above"])), hits=draw(st.integers(1, 2)), min_steps=draw(st.integers(1, steps))
    )
    outcome = draw(arrays(np.float64, (n, steps), elements=st.sampled_from([0.0, 1.0, 0.125])))
    return running_extremum(scores, rule), outcome, draw(st.integers(1, 3))


@given(cases(), st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=6), st.integers(1, 4))
def test_it_equals_brute_force_at_any_threshold(case, thresholds, chunk):
    extremum, outcome, shards = case
    kept, curve.CHUNK = curve.CHUNK, chunk  # small enough that runs are merged in many pieces
    try:
        builder, folder = build(extremum, outcome, shards)
        with folder, builder:
            ties = extremum[np.isfinite(extremum)].ravel()[:5]
            for bound in [*np.array(thresholds, extremum.dtype), *ties]:
                np.testing.assert_allclose(at(builder, extremum.shape[1], bound), brute(extremum, outcome, bound), atol=1e-12)
    finally:
        curve.CHUNK = kept


@given(cases(), st.integers(1, 9))
def test_sampled_places_lie_on_the_curve_from_strictest_to_loosest(case, count):
    extremum, outcome, shards = case
    builder, folder = build(extremum, outcome, shards)
    with folder, builder:
        places = sample_curve(builder, extremum.shape[1], count)
        for bound, depth, quality in zip(places.bound, places.mean_depth, places.quality, strict=True):
            np.testing.assert_allclose((depth, quality), brute(extremum, outcome, bound), atol=1e-12)
        assert (np.diff(places.bound) > 0).all()
        assert (np.diff(places.mean_depth) < 0).all()
        assert len(places.bound) <= max(count, 1)
        if len(places.bound):
            assert places.mean_depth[0] == extremum.shape[1]  # fires nowhere
            assert places.bound.dtype == extremum.dtype
        if len(places.bound) and count > 1:
            np.testing.assert_allclose(places.mean_depth[-1], brute(extremum, outcome, np.inf)[0])  # fires wherever it can


@given(cases(), st.sampled_from([0.0, 0.3, 0.5, 0.9]), st.sampled_from([1, -1]))
def test_the_fastest_threshold_that_is_good_enough_is_found(case, wanted, sign):
    extremum, outcome, shards = case
    builder, folder = build(extremum, outcome, shards)
    with folder, builder:
        bound, found = fastest_at(builder, sign * wanted, sign)
    seen = np.unique(extremum[:, :-1])
    seen = seen[seen < np.inf]
    after = [np.nextafter(e, np.asarray(np.inf, e.dtype)) for e in seen]
    good = [brute(extremum, outcome, b)[0] for b in after if sign * brute(extremum, outcome, b)[1] >= sign * wanted - 1e-12]
    assert found is bool(good)
    if found:
        depth, quality = brute(extremum, outcome, bound)
        assert depth == min(good)
        assert sign * quality >= sign * wanted - 1e-12


@pytest.mark.parametrize(("model", "signal"), [(m, s) for m in STEPS for s in signals(m)])
def test_a_traced_signals_curve_equals_brute_force_at_each_of_its_own_values(model, signal):
    shard = whole_trace(model)
    extremum = running_extremum(shard[f"score/{signal}"], Rule(signal, SIGNALS[signal].fires, SIGNALS[signal].closed))
    builder, folder = build(extremum, shard["loss"], shards=3)
    with folder, builder:
        for bound in np.unique(extremum[np.isfinite(extremum)])[::7]:
            np.testing.assert_allclose(at(builder, STEPS[model], bound), brute(extremum, shard["loss"], bound), atol=1e-10)


def test_a_rule_that_fires_only_at_the_last_step_has_no_curve():
    builder, folder = build(np.array([[np.inf, 0.5]]), np.zeros((1, 2)))
    with folder, builder:
        assert list(builder.chunks()) == []
        assert len(sample_curve(builder, 2, 5).bound) == 0
        assert fastest_at(builder, 0.0, 1) == (-np.inf, False)


def test_the_spilled_runs_are_gone_afterwards():
    builder, folder = build(np.ones((3, 4)), np.ones((3, 4)))
    with folder:
        with builder:
            assert list(Path(folder.name).glob("*.partial"))
        assert not list(Path(folder.name).iterdir())


FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(FLOATS, FLOATS, st.sampled_from([np.float32, np.float64]))
def test_a_bound_between_two_numbers_lies_above_the_first_and_not_above_the_second(a, b, dtype):
    low, high = sorted((dtype(a), dtype(b)))
    if low < high:
        found = between(low, high)
        assert low < found <= high
        assert found.dtype == low.dtype


@given(st.floats(-(2**20), 2**20, width=32), st.sampled_from([np.float32, np.float64]))
def test_a_bound_above_the_largest_number_is_above_it_and_finite(a, dtype):
    found = between(dtype(a), None)
    assert found > dtype(a)
    assert np.isfinite(found)
