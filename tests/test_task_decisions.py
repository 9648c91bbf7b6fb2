"""Runs of lm-eval tasks, read by what decides: compare, gate, calibrate and the report agree with the points table."""

import numpy as np
import pandas as pd
import pytest

from halting_bench.analysis.gate import Verdict, gate
from halting_bench.analysis.pairing import Point, Side, figures, pair
from halting_bench.analysis.rules import GateRules
from halting_bench.architectures.toy import write_toy
from halting_bench.calibrate import calibrate
from halting_bench.errors import UserError
from halting_bench.reporting.comparison import comparison_tables
from halting_bench.reporting.plots import PLOTS
from halting_bench.reporting.tables import summary_tables
from halting_bench.store import Run, load_run
from halting_bench.sweep_config import LmEvalConfig, SweepConfig
from halting_bench.sweeping.run import sweep
from tests.benchmarks.lm_eval_fixtures import write_tasks

EVIDENCE = {"lm-eval:choice": "replayed", "lm-eval:made": "executed"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = write_tasks(tmp_path_factory.mktemp("decisions"))
    write_toy(folder / "toy")
    config = SweepConfig(
        models=(str(folder / "toy"),),
        benchmarks=tuple(EVIDENCE),
        policies=("latent-diff", "entropy"),
        limit="all",
        max_steps=5,
        lm_eval=LmEvalConfig(include_path=str(folder)),
        latency={"enabled": False},
    )
    return load_run(sweep(config, out=folder / "run"))


@pytest.mark.parametrize("task", list(EVIDENCE))
def test_what_is_compared_is_what_the_points_say(run: Run, task: str) -> None:
    evidence = EVIDENCE[task]
    aligned = pair(run, run, "toy", "toy", task, evidence)
    rows = aligned.base.points.query(f"evidence == '{evidence}'").set_index(["policy", "threshold"])
    assert {point.policy for point in aligned.base.selected} >= {"fixed", "latent-diff"}
    for place, point in enumerate(aligned.base.selected):
        if point.threshold == point.threshold:
            row = rows.loc[point]
            assert aligned.base.mean_quality(place)[0] == pytest.approx(row["quality"])
            assert aligned.base.mean_depth(place)[0] == pytest.approx(row["mean_depth"])


def test_tokens_that_points_make_themselves_are_each_points_own() -> None:
    depth, tokens = np.array([[2.0, 4.0, 6.0], [9.0, 3.0, 0.0]]), np.array([[1, 2, 3], [3, 1, 1]])
    none = pd.DataFrame()
    side = Side((Point("kl", 1.0), Point("kl", 2.0)), np.ones((2, 3)), depth, np.ones((1, 3), int), tokens, none, none, {})
    mean, influences = side.mean_depth([0, 1])
    np.testing.assert_allclose(mean, [12 / 6, 12 / 5])
    np.testing.assert_allclose(influences[1], (depth[1] - 12 / 5 * tokens[1]) / 5)
    drawn, quality = figures(side, [0, 1], np.array([[1.0, 1.0, 1.0], [0.0, 3.0, 0.0]]))
    np.testing.assert_allclose(drawn, [[2.0, 2.4], [2.0, 3.0]])
    np.testing.assert_array_equal(quality, 1.0)


@pytest.mark.parametrize("task", list(EVIDENCE))
def test_a_run_against_itself_never_fails_a_gate(run: Run, task: str) -> None:
    depth = {"policy": "latent-diff", "benchmark": task, "evidence": EVIDENCE[task]}
    asked = [{"quantity": "quality", "margin": 0.1, **depth}, {"quantity": "flops", "margin": "1%", **depth}]
    judged = gate(run, run, GateRules.model_validate({"rules": asked}))
    assert {each.verdict for each in judged} == {Verdict.PASS}
    assert all(each.difference.value == 0 for each in judged)
    _, *tables = comparison_tables([run, run])
    (table,) = (each for each in tables if each.title.startswith(f"toy on {task}"))
    assert {row.cells[0] for row in table.rows} == {"fixed", "latent-diff", "entropy"}


def test_a_rule_that_asks_for_a_replay_of_made_text_says_what_to_ask_for(run: Run) -> None:
    asked = {"quantity": "quality", "margin": 0.1, "policy": "fixed", "benchmark": "lm-eval:made"}
    (judged,) = gate(run, run, GateRules.model_validate({"rules": [asked]}))
    assert judged.verdict is Verdict.INCOMPLETE
    assert "ask for evidence executed" in judged.reason


@pytest.mark.parametrize("task", list(EVIDENCE))
def test_calibration_reads_test_figures_of_the_kept_points(run: Run, task: str) -> None:
    frame = calibrate(run, 0.9, 0.1, bound=1.0)
    own = frame[(frame["benchmark"] == task) & (frame["evidence"] == EVIDENCE[task])].set_index("policy")
    points = run.points[(run.points["benchmark"] == task) & (run.points["subset"] == "all")]
    points = points[(points["split"] == "test") & (points["evidence"] == EVIDENCE[task])]
    points = points.set_index(["policy", "threshold"])
    assert own.loc["fixed", "status"] == "certified"
    for policy, row in own[own["status"] == "certified"].iterrows():
        point = points.loc[(policy, row["threshold"])]
        assert row["mean_depth_test"] == pytest.approx(point["mean_depth"])
        assert row["loss_test"] == pytest.approx(point["quality_full_depth"] - point["quality"])
    strict = calibrate(run, 0.01, 0.9)
    assert set(strict["status"]) == {"not certified"}
    assert strict["error"].str.contains("needs at least 230").all()


def test_the_report_shows_both_kinds_and_promises_nothing_where_nothing_was_replayed(run: Run) -> None:
    tables = {table.name: table for table in summary_tables(run)}
    acted = tables["acted-toy"]
    keys = [column.key for column in acted.columns]
    gaps = {row.cells[0]: [] for row in acted.rows}
    for row in acted.rows:
        gaps[row.cells[0]].append(row.cells[keys.index("executed_gap")])
    assert any(np.isfinite(gap) for gap in gaps["lm-eval:choice"] if gap is not None)
    assert all(gap is None or np.isnan(gap) for gap in gaps["lm-eval:made"])
    drawn = {name: draw(run, "toy", "lm-eval:made") is not None for name, draw in PLOTS.items()}
    assert drawn["quality-against-depth"]
    assert not drawn["convergence"]  # no signal was traced


def test_a_metric_with_no_natural_bound_is_asked_for_one(run: Run) -> None:
    rolling = run.per_document.assign(quality_sum=3.0 * run.per_document["quality_sum"] + 1)
    loud = Run(**{**vars(run), "per_document": rolling})
    with pytest.raises(UserError, match=r"values by document are not within .*type --bound"):
        calibrate(loud, 0.1, 0.9)
