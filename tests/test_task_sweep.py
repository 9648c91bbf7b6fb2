"""The sweep of lm-eval tasks: every point's rows are lm-eval's own numbers, from one traced pass."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from halting_bench.answering import answer
from halting_bench.architectures.toy import toy_model
from halting_bench.benchmarks.lm_eval_benchmark import LmEvalBenchmark
from halting_bench.catalog import find_policy
from halting_bench.halting.policies import FixedDepth
from halting_bench.jobs import Job, Plan
from halting_bench.plan import plan_policy
from halting_bench.records import POINT_COLUMNS
from halting_bench.sources import ModelSource
from halting_bench.store import open_run
from halting_bench.sweep_config import SweepConfig
from halting_bench.task_cells import replayed_cells, task_masks
from halting_bench.task_measures import Measure, summarise
from halting_bench.task_random import random_cell
from halting_bench.task_rows import cell_rows
from halting_bench.task_sweep import sweep_task
from halting_bench.unit import Unit, open_trace, trace_unit
from tests.benchmarks.lm_eval_fixtures import BYTES, LENGTH, executed_point, write_tasks

STEPS = 5
MODEL = toy_model()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def job_of(tasks: Path, names: str, policies: tuple[str, ...]) -> Job:
    benchmark = LmEvalBenchmark(f"lm-eval:{names}", BYTES, LENGTH, include_path=tasks)
    unit = Unit(
        key="toy/task/0",
        model_name="toy",
        benchmark_name=benchmark.name,
        seed=0,
        documents=tuple(benchmark.sample(None, 0)),
        sequences_each=None,
        calibration_fraction=0.5,
        max_steps=STEPS,
        mean_recurrence=4,
        shard_tokens=300,
        batch_tokens=256,
        plans=tuple(plan_policy(find_policy(name), MODEL.spec, STEPS) for name in policies),
    )
    return Job(
        model_name="toy",
        source=ModelSource("toy"),
        model_hash="h",
        benchmark=benchmark,
        benchmark_hash="b",
        replayable=True,
        units=(unit,),
    )


def swept(
    tasks: Path, folder: Path, names: str, policies: tuple[str, ...] = ("kl", "gate-cdf"), **changed: object
) -> tuple[dict[str, Any], Job]:
    job = replace(job_of(tasks, names, policies), **changed)  # type: ignore[arg-type]
    plan = Plan(SweepConfig(), "cpu", (job,), "run")
    with open_run(folder) as run:
        (frames,) = sweep_task(run, plan, job, MODEL, lambda: None, lambda: None)
    return frames, job


def uniform(job: Job, depth: int) -> dict[str, Any]:
    """lm-eval's results at a uniform depth that is really run."""
    suite = job.benchmark.suite  # type: ignore[attr-defined]
    return dict(suite.score(answer(MODEL, BYTES, suite.asks, executed_point(FixedDepth(depth), STEPS)).answers))


def test_rows_are_what_lm_eval_says_of_the_whole_sample(tasks: Path, tmp_path: Path) -> None:
    frames, job = swept(tasks, tmp_path, "choice")
    points = frames["points"]
    assert set(POINT_COLUMNS) <= set(points)
    whole = points[(points["policy"] == "fixed") & (points["split"] == "all")].set_index(["subset", "threshold"])
    for depth in range(1, STEPS + 1):
        theirs = uniform(job, depth)["results"]["choice"]
        for subset, metric in (("all", "acc"), ("metric:acc_norm", "acc_norm"), ("metric:acc_mutual_info", "acc_mutual_info")):
            row = whole.loc[(subset, depth)]
            assert row["metric"] == metric
            assert row["quality"] == theirs[f"{metric},none"]
            assert row["mean_depth"] == depth
            assert row["n_documents"] == 4
    replay = points["evidence"] == "replayed"
    kl = points[(points["policy"] == "kl") & (points["subset"] == "all") & replay]
    assert set(kl["split"]) == {"calibration", "test", "all"}
    assert set(kl[kl["role"] == "iso"]["split"]) == {"calibration", "test", "all"}
    refused = points[points["policy"] == "gate-cdf"]
    assert refused["status"].tolist() == ["not_applicable"]


def test_chosen_points_are_executed_beside_their_replay(tasks: Path, tmp_path: Path) -> None:
    frames, _ = swept(tasks, tmp_path, "word", ("latent-diff",))
    points = frames["points"]
    real = points[(points["evidence"] == "executed") & (points["subset"] == "all")]
    assert 1 <= real["threshold"].nunique() <= 3
    assert set(real["kv_mode"]) == {"latest"}
    assert set(real["split"]) == {"calibration", "test", "all"}
    assert set(points.loc[points["evidence"] == "replayed", "kv_mode"]) == {"full"}
    documents = frames["per_document"]
    acted = documents[documents["evidence"] == "executed"]
    assert len(acted) == 4 * real["threshold"].nunique()
    for threshold, group in acted.groupby("threshold"):
        row = real[(real["threshold"] == threshold) & (real["split"] == "all")].iloc[0]
        assert group["depth_sum"].sum() / group["n_tokens"].sum() == pytest.approx(row["mean_depth"])


def test_per_document_rows_average_to_the_row(tasks: Path, tmp_path: Path) -> None:
    frames, _ = swept(tasks, tmp_path, "choice", ("latent-diff",))
    points, documents = frames["points"], frames["per_document"]
    test = documents[documents["split"] == "test"]
    for (policy, threshold, evidence), group in test.groupby(["policy", "threshold", "evidence"]):
        mine = points[(points["policy"] == policy) & (points["threshold"] == threshold) & (points["subset"] == "all")]
        mine = mine[mine["evidence"] == evidence]
        row = mine[mine["split"] == "test"].iloc[0]
        assert group["quality_sum"].sum() / group["quality_count"].sum() == pytest.approx(row["quality"])
        assert group["depth_sum"].sum() / group["n_tokens"].sum() == pytest.approx(row["mean_depth"])


def test_a_document_without_a_value_weighs_nothing(tasks: Path, tmp_path: Path) -> None:
    word = yaml.safe_load((tasks / "word.yaml").read_text())
    word |= {"task": "some", "metric_list": word["metric_list"][:1]}
    (tmp_path / "judge.py").write_text(
        "def judge(document, answers):\n    return {'acc': answers[0][0]} if document['gold'] else {}\n"
    )
    (tmp_path / "some.yaml").write_text(yaml.safe_dump(word) + "process_results: !function judge.judge\n")
    frames, _ = swept(tmp_path, tmp_path / "run", "some", ("latent-diff",))
    points, documents = frames["points"], frames["per_document"]
    assert documents["quality_count"].sum() == len(documents) / 2
    fixed = points[(points["policy"] == "fixed") & (points["split"] == "test") & (points["threshold"] == 3)].iloc[0]
    own = documents[(documents["policy"] == "fixed") & (documents["split"] == "test") & (documents["threshold"] == 3)]
    assert fixed["n_documents"] == own["quality_count"].sum()
    assert fixed["quality"] == pytest.approx(own["quality_sum"].sum() / own["quality_count"].sum())


def test_a_resumed_sweep_gives_the_same_frames(tasks: Path, tmp_path: Path) -> None:
    first, _ = swept(tasks, tmp_path, "word")
    again, _ = swept(tasks, tmp_path, "word")
    assert set(first) == {"points", "per_document", "exits", "iso", "curves", "convergence"}
    for name, frame in first.items():
        pd.testing.assert_frame_equal(frame, again[name])


def test_a_group_has_rows_of_all_its_tasks_and_of_each(tasks: Path, tmp_path: Path) -> None:
    frames, job = swept(tasks, tmp_path, "both", ("kl",))
    points = frames["points"]
    fixed = points[(points["policy"] == "fixed") & (points["split"] == "all") & (points["threshold"] == 2)].set_index("subset")
    theirs = uniform(job, 2)
    assert fixed.loc["all", "quality"] == theirs["groups"]["both"]["acc,none"]
    for task in ("choice_b", "word"):
        assert fixed.loc[f"task:{task}", "quality"] == theirs["results"][task]["acc,none"]
        assert fixed.loc[f"task:{task}", "n_documents"] == 4
    assert fixed.loc["all", "n_tokens"] == fixed.loc["task:choice_b", "n_tokens"] + fixed.loc["task:word", "n_tokens"]


def test_an_aggregation_that_is_no_mean_is_the_task_s_own(tasks: Path, tmp_path: Path) -> None:
    frames, job = swept(tasks, tmp_path, "rolling", ("kl",))
    points = frames["points"]
    row = points[(points["policy"] == "fixed") & (points["threshold"] == 3) & (points["split"] == "all")].set_index("metric")
    theirs = uniform(job, 3)["results"]["rolling"]
    for metric in ("word_perplexity", "bits_per_byte"):
        assert row.loc[metric, "quality"] == pytest.approx(theirs[f"{metric},none"], rel=1e-5)
        assert row.loc[metric, "quality_lo"] < row.loc[metric, "quality"] < row.loc[metric, "quality_hi"]
        assert not row.loc[metric, "higher_is_better"]


def test_points_of_a_task_that_generates_are_executed(tasks: Path, tmp_path: Path) -> None:
    frames, job = swept(tasks, tmp_path, "made", ("latent-diff",))
    points = frames["points"]
    assert set(points["evidence"]) == {"executed"}
    assert set(points["metric"]) == {"exact_match,first", "exact_match,letters"}
    fixed = points[(points["policy"] == "fixed") & (points["split"] == "all") & (points["subset"] == "all")]
    assert fixed["threshold"].tolist() == [1, 2, 4, 5]
    assert fixed["mean_depth"].tolist() == [1, 2, 4, 5]
    theirs = uniform(job, 2)["results"]["made"]
    assert fixed.set_index("threshold").loc[2, "quality"] == theirs["exact_match,first"]


@pytest.mark.parametrize("names", ["word", "rolling"])
def test_executed_uniform_depths_cost_what_replayed_ones_cost(tasks: Path, tmp_path: Path, names: str) -> None:
    frames = [
        swept(tasks, tmp_path / str(replayable), names, ("kl",), replayable=replayable)[0] for replayable in (True, False)
    ]
    replayed, executed = (
        frame["points"].query("policy == 'fixed'").set_index(["split", "subset", "threshold"]) for frame in frames
    )
    both = replayed.loc[executed.index]
    assert executed["evidence"].unique() == ["executed"]
    for name in ("flops_per_token", "core_steps", "readouts", "n_tokens", "quality"):
        np.testing.assert_allclose(executed[name].to_numpy(float), both[name].to_numpy(float), rtol=1e-5, err_msg=name)
    assert executed["flops_per_token"].xs(("test", "all"), level=("split", "subset")).is_monotonic_increasing
    rule = frames[1]["points"].query("policy == 'kl'")
    assert (rule["flops_per_token"] > executed["flops_per_token"].min()).all()  # it pays for its readouts


def test_every_selected_point_has_a_control_that_stops_other_tokens_as_deep(tasks: Path, tmp_path: Path) -> None:
    frames, _ = swept(tasks, tmp_path, "choice", ("kl", "latent-diff"))
    points = frames["points"]
    keys = ["split", "subset", "threshold"]
    for policy in ("kl", "latent-diff"):
        own = points[(points["policy"] == policy) & (points["evidence"] == "replayed")].set_index(keys).sort_index()
        control = points[points["policy"] == f"random@{policy}"].set_index(keys)
        documents = frames["per_document"]
        kept = documents[(documents["policy"] == policy) & (documents["evidence"] == "replayed")]["threshold"].unique()
        assert len(control) == 9 * len(kept) > 0  # three splits, three metrics
        assert set(control["role"]) == {"control"}
        at = own.loc[control.index]
        for name in ("mean_depth", "depth_p95", "core_steps", "n_tokens", "n_documents"):
            np.testing.assert_array_equal(control[name], at[name], err_msg=name)
        np.testing.assert_allclose(at["delta_random"], control["delta_uniform"])
        one_depth = (control["depth_p95"] == control["mean_depth"]).to_numpy()
        np.testing.assert_allclose(control["quality"][one_depth], at["quality"][one_depth])


def test_random_exits_cost_what_their_histogram_says_on_average(tasks: Path, tmp_path: Path) -> None:
    job = job_of(tasks, "word", ("kl",))
    unit, benchmark = job.units[0], job.benchmark
    assert isinstance(benchmark, LmEvalBenchmark)
    with open_run(tmp_path) as run:
        trace_unit(run, unit, MODEL, benchmark, lambda: None)
        traced = open_trace(run, unit, MODEL, benchmark)
    masks, cells = task_masks(benchmark, unit), replayed_cells(unit, traced, None, benchmark, tmp_path)
    (policy,) = (cell_rows(cell.run(), benchmark.suite, unit, masks, None) for cell in cells if cell.name == "kl")
    point = int((policy.histogram > 0).sum(axis=2).min(axis=0).argmax())  # its tokens stop at several steps in both splits
    cell = random_cell(unit, traced, benchmark, policy, (float(policy.thresholds[point]),))
    drawn, again = ([sum(answer[0][0] for answer in said.values()) for said in cell.run().answers(0)] for _ in range(2))
    assert drawn == again
    error = np.std(drawn, ddof=1) / np.sqrt(len(drawn))
    assert error > 0
    loss = np.concatenate([shard["loss"] for shard in traced.shards]).astype(float)
    document = np.concatenate([traced.document_index(shard) for shard in traced.shards])
    shares = policy.histogram[:, point] / policy.histogram[:, point].sum(axis=1, keepdims=True)
    expected = -sum(
        (loss[traced.in_split(split)[document]] @ share).sum()
        for split, share in zip(("calibration", "test"), shares, strict=True)
    )
    assert abs(np.mean(drawn) - expected) < 3 * error


def test_a_point_whose_states_broke_is_a_failed_row_and_not_a_score() -> None:
    measure = Measure("acc", "acc,none", "all", ("t",), True, True, True)
    values = [[[1.0, 0.0, None]], [[np.nan, np.nan, np.nan]]]
    found = summarise(None, measure, values, np.ones(3, bool))  # type: ignore[arg-type]
    assert found[0].tolist()[0] == 0.5
    assert np.isnan(found[:, 1]).all()
