"""Timing a finished run: which points at which shapes, what is kept, and what the same command does next."""

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from halting_bench import SweepConfig, load_run
from halting_bench.architectures.toy import write_toy
from halting_bench.errors import UserError
from halting_bench.latency import merged, time_run
from halting_bench.latency_compare import against, self_test
from halting_bench.latency_plan import LatencyRequest, parse_point
from halting_bench.reporting.seconds import race_table
from halting_bench.reporting.tables import summary_tables
from halting_bench.sweeping.run import sweep
from halting_bench.timing.clock import FakeClock
from halting_bench.timing.protocol import Protocol
from tests.stepping_models import STEPS, stepping

QUICK = Protocol(min_runs=9, min_time_s=0.0, warm_ups=1)
POLICIES = ("latent-diff", "kl", "gate-cdf")


class SecondAToken(FakeClock):
    """A run takes a second a token, and one more for the rest, whatever the depth."""

    def time(self, run):
        sample = super().time(run)
        self.advance(1.0 + sample.tokens)
        return replace(sample, seconds=1.0 + sample.tokens)


class FailsOnce(SecondAToken):
    """The fifth run breaks: after two uniform depths and two neighbours, the first point's warm-up."""

    runs = 0

    def time(self, run):
        self.runs += 1
        if self.runs == 5:
            raise MemoryError("no room")
        return super().time(run)


def timed(path: Path, *points: str, clock: FakeClock | None = None, **how):
    request = LatencyRequest(
        points, **({"batch_rows": (2,), "length": 6, "new_tokens": 3, "protocol": QUICK, "time_budget_s": 1e6} | how)
    )
    return time_run(path, request, clock_of=lambda device: clock or SecondAToken())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("model") / "toy")


@pytest.fixture(scope="module")
def swept(tmp_path_factory, model) -> Path:
    config = SweepConfig(models=(str(model),), benchmarks=("shell",), policies=POLICIES, limit=4, max_steps=6, execute=False)
    return sweep(config, out=tmp_path_factory.mktemp("run") / "run")


@pytest.fixture
def run(swept, tmp_path) -> Path:
    """A copy of the run, to write into."""
    import shutil

    return Path(shutil.copytree(swept, tmp_path / "run"))


def shape_of(latency: pd.DataFrame) -> pd.DataFrame:
    return latency[["batch_rows", "mode", "phase", "length", "new_tokens"]].drop_duplicates()


def test_the_front_and_the_named_points_are_timed_in_both_phases_beside_uniform_depths(run):
    done = timed(run, "kl@0.5")
    points = done.points
    front = points[(points["split"] == "calibration") & points["on_front"] & points["distinct"] & (points["subset"] == "all")]
    wanted = {("kl", 0.5), ("fixed", 6.0), ("fixed", 4.0), *zip(front["policy"], front["threshold"], strict=True)}
    for phase in ("prefill", "decode"):
        rows = done.latency[done.latency["phase"] == phase]
        assert wanted <= set(zip(rows["policy"], rows["threshold"], strict=True))
        assert (rows["status"] == "ok").all() and (rows["latency_ms_per_token"] > 0).all()
        assert not rows.duplicated(["policy", "threshold", "batch_rows"]).any()
    assert shape_of(done.latency).values.tolist() == [[2, "eager", "prefill", 6, 0], [2, "eager", "decode", 6, 3]]


def test_seconds_that_do_not_depend_on_depth_are_a_speed_up_of_one(run):
    rows = timed(run, "kl@0.5").latency
    assert rows["speedup"].tolist() == pytest.approx([1.0] * len(rows))
    prefill, decode = (rows.loc[rows["phase"] == phase, "latency_ms_per_token"] for phase in ("prefill", "decode"))
    assert prefill.tolist() == pytest.approx([1000 * 13 / 12] * len(prefill))
    assert decode.tolist() == pytest.approx([1000.0] * len(decode))  # the prompts' own second is left out


def test_points_csv_holds_the_seconds_beside_the_uniform_depths_that_were_timed(run):
    timed(run)
    joined = pd.read_csv(run / "points.csv", keep_default_na=False)
    fixed = joined[(joined["policy"] == "fixed") & (joined["threshold"] == "6.0") & (joined["subset"] == "all")]
    assert set(fixed.loc[fixed["split"] == "test", "phase"]) == {"prefill", "decode"}


def test_the_same_command_measures_nothing_twice(run):
    before = timed(run).latency
    clock = SecondAToken()
    after = timed(run, clock=clock).latency
    assert clock.now() == 0.0
    pd.testing.assert_frame_equal(before, after)


def test_another_length_is_measured_and_takes_the_place_of_the_first(run):
    timed(run)
    after = timed(run, length=5).latency
    assert set(after["length"]) == {5}


def test_what_the_time_budget_cuts_is_a_skipped_row_that_the_next_command_measures(run):
    clock = SecondAToken()
    cut = timed(run, clock=clock, time_budget_s=1200.0).latency
    assert clock.now() < 1214.0
    assert {"ok", "skipped"} == set(cut["status"])
    assert cut.loc[cut["status"] == "skipped", "error"].str.contains("time budget").all()
    whole = timed(run).latency
    assert set(whole["status"]) == {"ok"}


def test_no_time_at_all_skips_every_point_without_a_run_and_the_table_says_so(run):
    clock = SecondAToken()
    done = timed(run, clock=clock, time_budget_s=0.0)
    assert set(done.latency["status"]) == {"skipped"}
    assert clock.now() == 0.0
    (table,) = (table for table in summary_tables(done) if table.name.startswith("latency"))
    assert {record["note"] for record in table.records()} == {"skipped"}


def test_a_sweep_that_resumes_keeps_the_seconds(run, model):
    before = timed(run).latency
    config = SweepConfig(models=(str(model),), benchmarks=("shell",), policies=POLICIES, limit=4, max_steps=6, execute=False)
    assert sweep(config, out=run) == run
    assert len(load_run(run).latency) == len(before)


def test_a_threshold_as_tables_print_it_is_the_point_that_they_print(run):
    points = load_run(run).points
    exact = points.loc[(points["policy"] == "latent-diff") & (points["threshold"] > 0), "threshold"]
    exact = next(value for value in exact if float(f"{value:.3g}") != value)
    latency = timed(run, f"latent-diff@{exact:.3g}").latency
    assert exact in latency.loc[latency["policy"] == "latent-diff", "threshold"].tolist()


def test_a_point_that_fails_leaves_the_others_alone_and_is_tried_again(run):
    first = timed(run, "kl@0.5", clock=FailsOnce()).latency
    failed = first[first["status"] != "ok"]
    assert failed[["policy", "threshold", "phase"]].values.tolist() == [["kl", 0.5, "prefill"]]
    assert failed["error"].tolist() == ["MemoryError: no room"]
    assert set(timed(run, "kl@0.5").latency["status"]) == {"ok"}


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("kl", "POLICY@THRESHOLD"),
        ("kl@nan", "POLICY@THRESHOLD"),
        ("@1", "unknown policy"),
        ("kll@1", "did you mean 'kl'"),
        ("fixed@9", "1..6"),
        ("gate-cdf@0.5", "applies to no model"),
    ],
)
def test_a_point_that_does_not_exist_is_refused(run, wrong, said):
    with pytest.raises(UserError, match=said):
        timed(run, wrong)


@pytest.mark.parametrize("wrong", [{"batch_rows": (0,)}, {"batch_rows": ()}, {"length": 0}, {"new_tokens": 1}])
def test_a_shape_that_cannot_be_is_refused(wrong):
    with pytest.raises(UserError, match="type --"):
        LatencyRequest(**wrong)


def test_a_model_that_changed_since_the_sweep_is_refused(run, model):
    weights = model / "model.safetensors"
    kept = weights.read_bytes()
    try:
        write_toy(model, seed=1)
        with pytest.raises(UserError, match="is not what"):
            timed(run)
    finally:
        weights.write_bytes(kept)


def test_a_point_against_itself_has_the_ratio_one_and_its_noise(run):
    frame = self_test(
        load_run(run),
        LatencyRequest(batch_rows=(1, 2), length=6, new_tokens=3, protocol=QUICK, time_budget_s=1e6),
        clock_of=lambda _: SecondAToken(),
    )
    assert frame[["batch_rows", "phase"]].values.tolist() == [[1, "prefill"], [1, "decode"], [2, "prefill"], [2, "decode"]]
    assert (frame[["ratio", "ratio_lo", "ratio_hi"]] == 1.0).all(axis=None) and (frame["noise"] == 0).all()
    assert len(race_table(frame, None).rows) == 4


def test_another_model_runs_in_turns_with_the_run_s_own(run, tmp_path):
    other = write_toy(tmp_path / "other", seed=3)
    request = LatencyRequest(("kl@0.5",), batch_rows=(2,), length=6, new_tokens=3, protocol=QUICK, time_budget_s=1e6)
    frame = against(load_run(run), str(other), request, clock_of=lambda _: SecondAToken())
    assert frame["policy"].tolist() == ["kl"] * 2 and (frame["ratio"] == 1.0).all()
    assert (frame["other_threshold"] == frame["threshold"]).all()
    assert frame["mean_depth"].tolist() != frame["other_mean_depth"].tolist()


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    """Times a run whose steps take a second against the same model with other steps."""
    folder = tmp_path_factory.mktemp("stepped")
    own = stepping(folder / "mine.py", "1")
    asked = SweepConfig(models=(own,), benchmarks=("shell",), policies=("kl",), limit=4, max_steps=8, execute=False)
    mine = load_run(sweep(asked, out=folder / "run"))

    def time_against(seconds: str, *, protocol: Protocol = QUICK, time_budget_s: float = 1e6) -> pd.DataFrame:
        points = ("kl@0.5", "fixed@2")
        request = LatencyRequest(points, (2,), None, 6, 3, time_budget_s=time_budget_s, protocol=protocol)
        return against(mine, stepping(folder / "theirs.py", seconds), request, clock_of=lambda _: STEPS)

    return time_against


def test_a_step_that_takes_a_tenth_longer_is_told_in_every_row(stepped):
    slower = stepped("1.1")
    assert slower["phase"].tolist() == ["prefill"] * 2 + ["decode"] * 2
    assert slower[["ratio", "ratio_lo", "ratio_hi"]].to_numpy() == pytest.approx(1.1)
    assert stepped("1")["ratio"].tolist() == pytest.approx([1.0] * 4)


def test_a_row_without_time_says_so_and_a_noisy_one_leaves_the_others_theirs(stepped):
    short = stepped("1.1", time_budget_s=500)
    assert short["status"].tolist()[:1] + short["status"].tolist()[-1:] == ["ok", "skipped"]
    assert "no room in 500 s" in short["error"].iloc[-1] and math.isnan(short["ratio"].iloc[-1])
    never_sure = replace(QUICK, noise_target=1e-9, max_time_s=1e9, max_runs=10**9)
    noisy = stepped("1 + torch.rand(()).item()", protocol=never_sure, time_budget_s=2500)
    assert noisy["status"].tolist() == ["ok"] * 4 and noisy["noisy"].all()


def test_another_run_brings_its_own_points_of_equal_quality(run, tmp_path):
    other = write_toy(tmp_path / "other", seed=3)
    config = SweepConfig(models=(str(other),), benchmarks=("shell",), policies=POLICIES, limit=4, max_steps=6, execute=False)
    path = sweep(config, out=tmp_path / "other-run")
    points = load_run(path).points
    iso = points[(points["role"] == "iso") & (points["policy"] == "kl") & (points["subset"] == "all")]["threshold"]
    request = LatencyRequest(("kl@0.5",), batch_rows=(2,), length=6, new_tokens=3, protocol=QUICK, time_budget_s=1e6)
    frame = against(load_run(run), str(path), request, clock_of=lambda _: SecondAToken())
    assert set(frame["other_threshold"]) == (set(iso) or {0.5})


def test_a_failed_measurement_never_takes_the_place_of_a_good_one():
    cell = {"model": "m", "benchmark": "b", "seed": 0, "policy": "kl", "threshold": 0.1}
    cell |= {"device": "cpu", "batch_rows": 1, "mode": "eager", "phase": "prefill", "length": 6, "new_tokens": 0}
    old = pd.DataFrame([cell | {"status": "ok", "p10": 1.0}])
    new = pd.DataFrame([cell | {"status": "skipped"}, cell | {"batch_rows": 8, "status": "skipped"}])
    both = merged(old, new)
    assert both["status"].tolist() == ["ok", "skipped"] and both["batch_rows"].tolist() == [1, 8]
    again = merged(both, pd.DataFrame([cell | {"status": "ok", "p10": 2.0}]))
    assert again.loc[again["batch_rows"] == 1, "p10"].tolist() == [2.0]


def test_points_are_named_policy_at_threshold():
    assert parse_point("mine@x@0.5") == ("mine@x", 0.5)
