"""What calibration chooses, and that the test documents have no say in it."""

import numpy as np
import pandas as pd
import pytest

from halting_bench.analysis.selection import DELTAS, FIGURES, choose_iso, iso_rows, mark_iso
from halting_bench.records import Metric

FULL = 4


def rows(metric: Metric = Metric.ACCURACY, seed: int = 0) -> pd.DataFrame:
    """Uniform depths 1..8, an oracle, a rule with six thresholds and its random control; one that did not run."""
    rng = np.random.default_rng(seed)
    sign = 1 if metric.higher_is_better else -1
    out = []

    def add(policy: str, threshold: float, depth: float, quality: float, role: str = "grid") -> None:
        for split in ("calibration", "test"):
            noise = 0.0 if policy == "fixed" else rng.normal() * 1e-4
            value = sign * (quality + noise)
            figures = {"mean_depth": depth, "quality": value, "quality_lo": value - 0.01, "quality_hi": value + 0.01}
            figures |= {"quality_full_depth": sign * 0.8, "never_fired_fraction": 0.1, "exhausted_fraction": 0.2}
            told = {"policy": policy, "threshold": threshold, "split": split, "role": role, "status": "ok", "error": ""}
            params = '{"optimistic": true}' if policy == "oracle-loss" else "{}"
            out.append(told | figures | dict.fromkeys(DELTAS, 0.0) | {"flops_per_token": 10.0 * depth, "params": params})

    for depth in range(1, 9):
        add("fixed", float(depth), float(depth), min(0.8, 0.5 + 0.1 * (depth - 1)), "control")
    for price, depth in ((0.0, 3.0), (0.1, 2.0), (0.3, 1.0)):
        add("oracle-loss", price, depth, 0.7 + 0.06 * depth, "control")
    points = ((0.9, 1.5, 0.6), (0.5, 2.2, 0.77), (0.3, 2.8, 0.7995), (0.2, 3.1, 0.79), (0.1, 3.5, 0.81), (0.0, 8.0, 0.8))
    for threshold, depth, quality in points:
        add("rule", threshold, depth, quality)
        add("random@rule", threshold, depth, 0.9)
    add("weak", 0.5, 2.0, 0.6)
    blank = {"policy": "gated", "threshold": np.nan, "split": "test", "role": "grid"}
    blank |= {"status": "not_applicable", "error": "no gate"}
    return pd.DataFrame([*out, blank])


METRICS = pytest.mark.parametrize("metric", list(Metric))


@METRICS
def test_the_least_depth_within_tolerance_is_chosen_on_calibration(metric: Metric):
    frame = rows(metric)
    chosen = frame.loc[choose_iso(frame, metric)]
    assert set(chosen["split"]) == {"calibration"}
    picked = chosen.set_index("policy")
    assert picked.loc["rule", "threshold"] == 0.3
    assert picked.loc["fixed", "threshold"] == FULL
    assert "weak" not in picked.index
    assert not any(policy.startswith("random@") for policy in picked.index)


@METRICS
def test_no_test_row_has_a_say_in_what_is_chosen(metric: Metric):
    frame = rows(metric)
    before = choose_iso(frame, metric)
    rng = np.random.default_rng(1)
    test = frame["split"] == "test"
    for column in ("quality", "mean_depth", "quality_full_depth"):
        frame.loc[test, column] = rng.uniform(-9, 9, test.sum())
    pd.testing.assert_series_equal(choose_iso(frame, metric), before)
    marked = frame.copy()
    mark_iso(marked, metric)
    assert set(marked.loc[marked["role"] == "iso", "threshold"]) == {0.3}


def test_both_splits_of_the_chosen_point_are_marked_and_controls_keep_their_role():
    frame = rows()
    mark_iso(frame, Metric.ACCURACY)
    marked = frame[frame["role"] == "iso"]
    assert marked[["policy", "threshold", "split"]].values.tolist() == [["rule", 0.3, "calibration"], ["rule", 0.3, "test"]]
    assert set(frame.loc[frame["policy"].isin(["fixed", "oracle-loss", "random@rule"]), "role"]) == {"control", "grid"}
    assert set(frame.loc[frame["policy"] == "fixed", "role"]) == {"control"}


@METRICS
def test_the_figures_of_a_chosen_point_are_those_of_its_test_row(metric: Metric):
    frame = rows(metric)
    table = iso_rows(frame, metric, FULL).set_index("policy")
    found, test = table.loc["rule"], frame.query("policy == 'rule' and threshold == 0.3 and split == 'test'").iloc[0]
    for name in ("quality", "quality_lo", "quality_hi", "mean_depth", "never_fired_fraction", "flops_per_token"):
        assert found[name] == test[name]
    assert found["saving_full"] == pytest.approx(1 - 2.8 / 4)
    assert found["saving_uniform"] == pytest.approx(1 - 2.8 / 4)
    assert (found["full_depth"], found["uniform_depth"]) == (4, 4)


@METRICS
def test_the_share_of_the_oracle_gap_is_taken_at_the_points_own_depth(metric: Metric):
    frame = rows(metric)
    sign = 1 if metric.higher_is_better else -1
    found = iso_rows(frame, metric, FULL).set_index("policy").loc["rule"]
    test = frame[frame["split"] == "test"]
    oracle = test[test["policy"] == "oracle-loss"].sort_values("mean_depth")
    uniform = sign * (0.5 + 0.1 * (2.8 - 1))
    best = np.interp(2.8, oracle["mean_depth"], oracle["quality"])
    assert found["gap_share"] == pytest.approx((found["quality"] - uniform) / (best - uniform))
    assert bool(found["gap_optimistic"])


def test_policies_that_reach_it_nowhere_or_do_not_apply_keep_a_row_that_says_so():
    table = iso_rows(rows(), Metric.ACCURACY, FULL).set_index("policy")
    assert table.loc["weak", "status"] == "unreached"
    assert "calibration" in table.loc["weak", "error"]
    assert table.loc["gated", ["status", "error"]].tolist() == ["not_applicable", "no gate"]
    assert table.loc[["weak", "gated"], ["threshold", "quality", "saving_full"]].isna().all(axis=None)
    assert not any(policy.startswith("random@") for policy in table.index)


def test_outside_the_oracles_range_there_is_no_share():
    frame = rows()
    shallow = frame["policy"] == "oracle-loss"
    frame.loc[shallow, "mean_depth"] /= 4
    assert np.isnan(iso_rows(frame, Metric.ACCURACY, FULL).set_index("policy").loc["rule", "gap_share"])


def test_points_without_a_quality_are_never_chosen():
    frame = rows()
    frame.loc[(frame["policy"] == "rule") & (frame["threshold"] == 0.3), "quality"] = np.nan
    chosen = frame.loc[choose_iso(frame, Metric.ACCURACY)].set_index("policy")
    assert chosen.loc["rule", "threshold"] == 0.1


def test_where_nothing_was_reached_every_column_is_there_all_the_same():
    blank = rows().assign(quality=np.nan, quality_full_depth=np.nan)
    table = iso_rows(blank, Metric.ACCURACY, FULL)
    assert set(table.loc[table["policy"] != "gated", "status"]) == {"unreached"}
    assert table[list(FIGURES)].isna().all(axis=None)
