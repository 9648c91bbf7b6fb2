from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from halting_bench.reporting.acted import acted
from halting_bench.reporting.exports import FORMATS, render
from halting_bench.reporting.frames import chosen_points, executed_mode, problems, ranked, select, usual_setting
from halting_bench.reporting.table import Column, Kind, table_of
from halting_bench.reporting.tables import equal_depth, front, iso, latency, levels, summary, summary_tables

MODEL = "huginn-tiny"


def cell(table, policy, key):
    index = [column.key for column in table.columns].index(key)
    (row,) = [row for row in table.rows if row.cells[0] == policy]
    return row.cells[index]


def test_the_summary_comes_first_and_every_benchmark_has_its_tables(run, executed_run):
    kinds = ("iso", "equal-depth", "front", "costs", "levels")
    expected = [f"{kind}-{MODEL}-{benchmark}" for benchmark in ("shell", "docs") for kind in kinds]
    assert [table.name for table in summary_tables(run)] == ["summary", *expected]
    assert f"latency-{MODEL}-docs" in [table.name for table in summary_tables(executed_run)]


def test_the_best_policy_is_chosen_on_calibration_documents_and_shown_on_test_documents(run):
    points = run.points.copy()
    entropy = (points["policy"] == "entropy") & (points["benchmark"] == "shell")
    points.loc[entropy & (points["split"] == "calibration"), "mean_depth"] = 1.5
    assert ranked(run, MODEL, "shell")[0] != "entropy"
    table = summary(replace(run, points=points), MODEL)
    assert table.rows[0].cells[:2] == ("shell", "entropy")
    chosen = run.iso[(run.iso["policy"] == "entropy") & (run.iso["benchmark"] == "shell")].iloc[0]
    assert cell(table, "shell", "mean_depth") == chosen["mean_depth"]


def test_what_happens_on_test_documents_does_not_change_which_policy_is_called_best(run):
    points, chosen = run.points.copy(), run.iso.copy()
    points.loc[points["split"] == "test", "mean_depth"] = np.linspace(1, 16, (points["split"] == "test").sum())
    chosen["mean_depth"] = np.linspace(16, 1, len(chosen))
    assert ranked(replace(run, points=points, iso=chosen), MODEL, "docs") == ranked(run, MODEL, "docs")


def test_a_benchmark_on_which_no_policy_keeps_the_quality_says_so(run):
    chosen = run.iso.copy()
    chosen.loc[(chosen["benchmark"] == "docs") & (chosen["policy"] != "fixed"), "status"] = "unreached"
    table = summary(replace(run, iso=chosen), MODEL)
    assert table.rows[1].cells[:2] == ("docs", "none")
    assert cell(table, "docs", "mean_depth") is None
    assert cell(table, "docs", "full_quality") > 0


def test_rules_come_first_by_depth_then_controls_then_what_has_no_point(run):
    rows = iso(run, MODEL, "docs").rows
    depths = [row.cells[3] for row in rows]
    kinds = [(row.cells[3] is None, row.control) for row in rows]
    assert kinds == sorted(kinds)
    rules = [depth for depth, kind in zip(depths, kinds, strict=True) if kind == (False, False)]
    assert rules == sorted(rules)
    assert {row.cells[0] for row in rows if row.control} == {"fixed", "oracle-loss"}


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_that_went_wrong_is_hidden_in_any_format(run, format):
    text = render(iso(run, MODEL, "docs"), format)
    assert "nonfinite 0.3" in text
    assert "unreached" in text
    assert "not applicable" in text
    if format != "csv":  # raw rows only
        assert "this model has no halting gate" in text
        assert "1 of 19 cells failed" in text
        assert "no threshold is good enough" in text


def test_a_rule_that_never_fires_is_noted(run):
    chosen = run.iso.copy()
    chosen.loc[chosen["policy"] == "kl", "never_fired_fraction"] = 1.0
    assert cell(iso(replace(run, iso=chosen), MODEL, "shell"), "kl", "note") == "never fires"


def test_a_rule_that_stops_every_token_at_the_same_step_is_noted(run):
    table = iso(run, MODEL, "shell")
    exits = run.exits.copy()
    kl = (exits["policy"] == "kl") & (exits["benchmark"] == "shell")
    exits = pd.concat([exits[~kl], exits[kl & (exits["step"] == 5)]])
    noted = iso(replace(run, exits=exits), MODEL, "shell")
    assert cell(noted, "kl", "note").startswith("always at step")
    assert not cell(table, "kl", "note")
    assert not any(row.cells[-1] for row in noted.rows if row.control)


def test_the_note_column_is_left_out_where_there_is_nothing_to_note(run):
    chosen = run.iso[run.iso["status"] == "ok"]
    table = iso(replace(run, iso=chosen), MODEL, "shell")
    assert "note" not in [column.key for column in table.columns]


def test_best_values_are_emphasised_among_rules_that_ran_only(run):
    table = iso(run, MODEL, "docs")
    emphasised = {row.cells[0] for row in table.rows if 3 in row.best}
    depths = {row.cells[0]: row.cells[3] for row in table.rows if not row.control and row.cells[3] is not None}
    assert emphasised == {name for name, depth in depths.items() if depth == min(depths.values())}
    assert cell(table, "oracle-loss", "mean_depth") < min(depths.values()) or "oracle-loss" not in emphasised


def test_an_advantage_is_emphasised_only_when_its_whole_interval_is_above_zero():
    frame = pd.DataFrame(
        {"d": [0.1, 0.1, -0.1, np.nan], "d_lo": [0.01, -0.01, -0.2, np.nan], "d_hi": [0.2, 0.2, -0.01, np.nan]}
    )
    table = table_of("t", "t", [Column("d", "d", Kind.DELTA, interval=True, best="positive")], frame)
    assert [bool(row.best) for row in table.rows] == [True, False, False, False]


def test_the_random_control_stands_beside_its_policy(run):
    table = iso(run, MODEL, "shell")
    threshold = cell(table, "cosine", "threshold")
    points = select(run.points[run.points["benchmark"] == "shell"], "test")
    (expected,) = points.loc[(points["policy"] == "random@cosine") & (points["threshold"] == threshold), "quality"]
    assert cell(table, "cosine", "random_quality") == expected


def test_replayed_stands_beside_executed_with_the_gap_between(run, executed_run):
    assert acted(run, MODEL) is None
    table, promised = acted(executed_run, MODEL), iso(executed_run, MODEL, "docs")
    (row,) = [row for row in table.rows if row.cells[:2] == ("docs", "kl")]
    shown = dict(zip([column.key for column in table.columns], row.cells, strict=True))
    assert shown["executed_gap"] == pytest.approx(shown["executed_quality"].value - cell(promised, "kl", "quality").value)
    assert shown["executed_depth"] == pytest.approx(cell(promised, "kl", "mean_depth") + 0.03)
    assert "executed_gap" in [column.key for column in front(executed_run, MODEL, "docs").columns]


def test_the_default_kv_mode_is_the_one_shown(executed_run):
    points = executed_run.points.copy()
    more = points[points["evidence"] == "executed"].assign(kv_mode="absent", quality=9.0)
    both = pd.concat([more, points], ignore_index=True)
    assert executed_mode(both) == "latest"
    table = front(replace(executed_run, points=both), MODEL, "docs")
    column = [column.key for column in table.columns].index("executed_quality")
    shown = [row.cells[column].value for row in table.rows if row.cells[column] is not None]
    assert all(not value >= 9 for value in shown)


def test_noisy_latencies_are_flagged_and_the_setting_is_named(executed_run):
    table = acted(executed_run, MODEL)
    (row,) = [row for row in table.rows if row.cells[:2] == ("shell", "kl")]
    shown = dict(zip([column.key for column in table.columns], row.cells, strict=True))
    assert shown["note"] == "noisy"
    assert shown["latency_ms_per_token"] == 0.4
    assert any(note.startswith("Latency: decode, batch rows 1, eager, on cpu, 2 threads.") for note in table.footnotes)
    assert usual_setting(executed_run.latency).batch_rows == 1
    assert {row.cells[-1] for row in latency(executed_run, MODEL, "shell").rows} == {"", "noisy"}


def test_the_front_is_chosen_on_calibration_and_shown_on_test_documents(run):
    points = run.points[(run.points["benchmark"] == "docs") & (run.points["subset"] == "all")]
    chosen = points[points["on_front"] & (points["split"] == "calibration")]
    table = front(run, MODEL, "docs")
    assert {row.cells[:2] for row in table.rows} == set(zip(chosen["policy"], chosen["threshold"], strict=True))
    test = select(points, "test").set_index(["policy", "threshold"])
    for row in table.rows:
        assert row.cells[2] == test.loc[row.cells[:2], "mean_depth"]
        sign_of_loss = -1
        gain = sign_of_loss * (row.cells[3].value - test.loc[row.cells[:2], "quality_full_depth"])
        assert row.cells[4] == pytest.approx(gain)


def test_thresholds_of_one_policy_with_the_same_exits_are_one_point_and_ties_of_policies_stay(run):
    points = run.points.copy()
    template = points[points["on_front"] & (points["policy"] == "margin") & (points["benchmark"] == "docs")].iloc[[0]]
    twin = template.assign(threshold=0.123)
    namesake = template.assign(policy="max-prob")
    table = front(replace(run, points=pd.concat([points, twin, namesake], ignore_index=True)), MODEL, "docs")
    keys = [row.cells[:2] for row in table.rows]
    assert ("margin", 0.123) not in keys
    assert ("max-prob", template["threshold"].item()) in keys


def test_levels_stand_between_full_depth_and_the_oracle(run):
    table = levels(run, MODEL, "shell")
    first = [row.cells[1] for row in table.rows if row.cells[0] == "level:1-2"]
    assert first == ["fixed", *ranked(run, MODEL, "shell")[:3], "oracle-loss"]
    assert {row.cells[3] for row in table.rows if row.cells[1] == "fixed"} == {8.0}
    assert sum(row.starts_group for row in table.rows) == 3


def test_policies_without_a_point_are_not_compared_at_equal_depth(run):
    names = [row.cells[0] for row in equal_depth(run, MODEL, "shell").rows]
    assert "kl" in names
    assert not {"gate-cdf", "fixed-point-inf"} & set(names)


def test_several_seeds_are_averaged_and_a_seed_that_fell_short_is_noted(run):
    other_iso = run.iso.assign(seed=1, mean_depth=run.iso["mean_depth"] + 2)
    other_iso.loc[other_iso["policy"] == "margin", ["status", "threshold", "mean_depth"]] = ["unreached", np.nan, np.nan]
    both = replace(
        run,
        iso=pd.concat([run.iso, other_iso], ignore_index=True),
        points=pd.concat([run.points, run.points.assign(seed=1)], ignore_index=True),
    )
    table, single = iso(both, MODEL, "shell"), iso(run, MODEL, "shell")
    assert cell(table, "kl", "mean_depth") == pytest.approx(cell(single, "kl", "mean_depth") + 1)
    assert cell(table, "margin", "note") == "1 of 2 seeds"
    assert any("Means over 2 seeds" in note for note in table.footnotes)
    assert "margin" not in ranked(both, MODEL, "shell")
    assert "seed" in [column.key for column in front(both, MODEL, "shell").columns]


def test_several_models_have_a_summary_each(run):
    frames = {
        name: pd.concat([frame, frame.assign(model="second")]) for name, frame in (("points", run.points), ("iso", run.iso))
    }
    names = [table.name for table in summary_tables(replace(run, **frames))]
    assert names[:2] == ["summary-huginn-tiny", "summary-second"]
    assert len(names) == len(set(names))


def test_problems_count_the_cells_and_give_the_reason(run):
    lines = problems(run.points[run.points["benchmark"] == "docs"])
    assert "gate-cdf: not applicable: this model has no halting gate" in lines
    assert any(line.startswith("latent-diff: 1 of 19 cells failed") for line in lines)


def test_the_run_is_left_as_it_was(executed_run):
    before = [frame.copy() for frame in (executed_run.points, executed_run.iso, executed_run.latency)]
    summary_tables(executed_run)
    for frame, old in zip((executed_run.points, executed_run.iso, executed_run.latency), before, strict=True):
        pd.testing.assert_frame_equal(frame, old)


def test_every_chosen_policy_keeps_its_row(run):
    assert set(chosen_points(run, MODEL, "docs")["policy"]) == set(run.iso["policy"])


def test_full_depth_of_several_loops_is_uniform_depth_at_the_trained_steps_of_each(executed_run):
    points = executed_run.points.assign(mean_depth=3 * executed_run.points["mean_depth"])
    points = points[points["evidence"] == "executed"].assign(kv_mode="latest", role="iso")
    uniform = executed_run.points[executed_run.points["policy"] == "fixed"].assign(evidence="executed", kv_mode="latest")
    uniform["mean_depth"] *= 3
    points = pd.concat([points[points["policy"] != "fixed"], uniform], ignore_index=True)
    iso_frame = executed_run.iso.assign(full_depth=3 * executed_run.iso["full_depth"])
    table = acted(replace(executed_run, points=points, iso=iso_frame), MODEL)
    first = dict(zip([column.key for column in table.columns], table.rows[0].cells, strict=True))
    assert (first["policy"], first["threshold"], first["executed_depth"]) == ("fixed", 8.0, 24.0)
