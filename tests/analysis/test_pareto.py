import moocore
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halting_bench.analysis.pareto import FRONT_KEYS, front_mask, hypervolume, mark_fronts

POINTS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=30)


def axes(points):
    array = np.array(points, dtype=np.float64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def dominates(a, b, sign):
    return a[0] <= b[0] and sign * a[1] >= sign * b[1] and (a[0] < b[0] or a[1] != b[1])


@given(points=POINTS, higher=st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_front_is_what_comparing_every_pair_gives(points, higher):
    sign = 1 if higher else -1
    expected = [not any(dominates(other, point, sign) for other in points) for point in points]
    assert front_mask(*axes(points), higher).tolist() == expected


@given(points=POINTS.filter(len), higher=st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_front_agrees_with_moocore(points, higher):
    depth, quality = axes(points)
    expected = moocore.is_nondominated(np.c_[depth, quality], maximise=[False, higher], keep_weakly=True)
    assert front_mask(depth, quality, higher).tolist() == expected.tolist()


def test_points_equal_on_both_axes_all_keep_their_place():
    assert front_mask(np.array([2.0, 2.0, 3.0]), np.array([0.5, 0.5, 0.5]), True).tolist() == [True, True, False]


def test_a_point_without_a_depth_or_a_quality_is_on_no_front():
    depth, quality = np.array([np.nan, 1.0, 2.0]), np.array([9.0, np.nan, 0.1])
    assert front_mask(depth, quality, True).tolist() == [False, False, True]


def test_an_infinite_loss_is_kept_only_where_nothing_is_shallower():
    assert front_mask(np.array([1.0, 2.0, 3.0]), np.array([np.inf, np.inf, 1.0]), False).tolist() == [True, False, True]


@given(points=POINTS, higher=st.booleans(), reference=st.tuples(st.integers(1, 7), st.integers(-1, 6)))
@settings(max_examples=200, deadline=None)
def test_the_hypervolume_agrees_with_moocore(points, higher, reference):
    depth, quality = axes(points)
    expected = moocore.hypervolume(np.c_[depth, quality], ref=np.array(reference, dtype=float), maximise=[False, higher])
    assert hypervolume(depth, quality, higher, reference) == pytest.approx(expected, abs=1e-12)


def test_the_hypervolume_of_one_point_is_its_rectangle():
    assert hypervolume(np.array([4.0]), np.array([1.5]), False, (16.0, 2.5)) == 12.0


def frame(**columns):
    base = {key: "x" for key in FRONT_KEYS} | {"higher_is_better": True, "status": "ok"}
    return pd.DataFrame({**base, **columns})


def test_groups_do_not_compete_with_each_other():
    points = frame(policy="kl", subset=["all", "level:1"], mean_depth=[2.0, 3.0], quality=[0.9, 0.5])
    assert mark_fronts(points).tolist() == [True, True]


def test_oracles_random_controls_and_failed_cells_take_no_place_on_the_front():
    points = frame(
        policy=["oracle-loss", "random@kl", "fixed", "kl", "margin"],
        status=["ok", "ok", "ok", "ok", "failed"],
        mean_depth=[1.0, 1.0, 2.0, 3.0, 1.0],
        quality=[1.0, 1.0, 0.5, 0.6, 1.0],
    )
    assert mark_fronts(points).tolist() == [False, False, True, True, False]
