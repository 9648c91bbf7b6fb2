"""Sweeps whose every point is acted out: an encoder, a model of three loops."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
from toy_sweeps import assert_same_points

from halting_bench import load_run, sweep
from halting_bench.calibrate import calibrate
from halting_bench.errors import UserError
from halting_bench.latency import time_run
from halting_bench.latency_plan import LatencyRequest
from halting_bench.reporting.tables import summary_tables
from halting_bench.sweep_config import SweepConfig
from halting_bench.timing.protocol import Protocol

POLICIES = ("latent-diff", "entropy", "gate-cdf")
TASK = {"self-tiny": "roots", "two-scale-tiny": "shell"}


def config(model: str) -> SweepConfig:
    return SweepConfig(models=(model,), benchmarks=(TASK[model],), policies=POLICIES, limit=4, max_steps=8, plots=False)


@pytest.fixture(scope="module", params=TASK)
def swept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("executed") / "run"
    return request.param, sweep(config(request.param), out=folder)


def test_every_row_was_executed_and_the_tables_say_so(swept: tuple[str, Path]) -> None:
    _, folder = swept
    run = load_run(folder)
    assert set(run.points["evidence"]) == {"executed"}
    assert set(run.points["policy"]) == {"fixed", *POLICIES, "random@latent-diff", "random@entropy"}
    (refused,) = run.points.loc[run.points["policy"] == "gate-cdf", "error"]
    assert refused == "the model has no halting gate"
    names = [table.name.partition("-")[0] for table in summary_tables(run)]
    assert {"summary", "acted", "iso", "front", "costs", "levels"} <= set(names)


def test_a_finished_policy_is_not_run_again_and_a_missing_one_comes_back_the_same(
    swept: tuple[str, Path], tmp_path: Path
) -> None:
    model, folder = swept[0], Path(shutil.copytree(swept[1], tmp_path / "run"))
    before = load_run(folder).points
    (cells,) = (folder / "cells" / model).glob("*/0")
    kept, lost = cells / "entropy.parquet", cells / "latent-diff.parquet"
    told = pd.read_parquet(kept).assign(quality_full_depth=0.123)
    told.to_parquet(kept)  # were it run again, this mark would go
    lost.unlink()
    (folder / "points.parquet").unlink()
    sweep(config(model), out=folder)
    after = load_run(folder).points
    marked = after["policy"].isin(["entropy", "random@entropy"])
    assert set(after.loc[marked, "quality_full_depth"]) == {0.123}
    assert_same_points(after[~marked], before[~before["policy"].isin(["entropy", "random@entropy"])])


def test_points_that_one_threshold_names_are_timed(swept: tuple[str, Path], tmp_path: Path) -> None:
    model, folder = swept
    copy = Path(shutil.copytree(folder, tmp_path / "run"))
    quick = Protocol(min_runs=6, min_time_s=0.0, warm_ups=1)
    request = LatencyRequest(("latent-diff@0.3",), batch_rows=(2,), length=8, new_tokens=3, protocol=quick, time_budget_s=1e6)
    timed = time_run(copy, request).latency
    assert set(timed["phase"]) == ({"prefill"} if model == "self-tiny" else {"prefill", "decode"})
    mine = timed[(timed["policy"] == "latent-diff") & (timed["threshold"] == 0.3)]
    assert (mine["status"] == "ok").all()
    assert (mine["latency_ms_per_token"] > 0).all()
    points = load_run(copy).points
    several = points[points["params"].str.contains("thresholds", na=False) & (points["policy"] != "fixed")]
    assert (model == "two-scale-tiny") == bool(len(several))  # its quantiles differ by loop: no one threshold names them
    assert not set(timed.loc[timed["policy"] == "latent-diff", "threshold"]) & set(several["threshold"])


def test_a_run_that_was_only_acted_out_can_be_asked_again_and_is_not_calibrated(
    swept: tuple[str, Path], tmp_path: Path
) -> None:
    model, folder = swept
    again = load_run(sweep(config(model).model_copy(update={"like": str(folder)}), out=tmp_path / "again"))
    assert_same_points(again.points, load_run(folder).points)
    with pytest.raises(UserError, match="holds points acted out only"):
        calibrate(again, 0.1, 0.9)
