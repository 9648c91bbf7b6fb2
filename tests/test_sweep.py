"""Laws of the sweep: what it may not depend on, and what it does with what goes wrong."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_sweeps import POLICIES, assert_same_points, settings, sorted_points

from halting_bench.architectures.load import load_model
from halting_bench.architectures.noise import initial_noise
from halting_bench.benchmarks.base import NOT_SCORED
from halting_bench.benchmarks.procedural import TASKS
from halting_bench.errors import UserError
from halting_bench.halting.policies import ThresholdPolicy
from halting_bench.halting.policy import View
from halting_bench.jobs import plan_sweep
from halting_bench.store import Run, load_run, open_run
from halting_bench.sweeping.run import sweep


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return load_run(sweep(settings(folder), out=folder / "run"))


def test_every_policy_has_rows_and_every_control(run: Run):
    assert set(run.points["policy"]) >= {"fixed", "oracle-loss", "oracle-saturation", "random@kl", "Patient", *POLICIES}
    assert set(run.points["status"]) == {"ok", "not_applicable"}
    assert set(run.points["split"]) == {"calibration", "test"}


def test_a_rule_that_does_not_apply_is_a_row_that_says_why(run: Run):
    rows = run.points[run.points["policy"] == "gate-cdf"]
    assert rows["status"].tolist() == ["not_applicable"]
    assert rows["error"].tolist() == ["the model has no halting gate"]
    assert rows["quality"].isna().all()


def test_points_are_what_a_plain_live_loop_gives(run: Run, folder: Path):
    """Straight from the model and the task: no shards, no batches, no replay."""
    model = load_model(folder / "toy", dtype=torch.float64)
    documents = TASKS["shell"]().sample(4, 0)
    row = run.points.query("policy == 'latent-diff' and split == 'test' and subset == 'all' and mean_depth < 6").iloc[-1]
    policy = ThresholdPolicy("latent-diff", row["threshold"])
    exits, right = [], []
    for document in documents[2:]:
        for text in TASKS["shell"]().sequences(document):
            scored = text.targets != NOT_SCORED
            noise = initial_noise(0, np.full((1, 1), text.uid), np.arange(len(text.tokens))[None], 16)
            tokens = torch.from_numpy(text.tokens)[None]
            own = np.full(len(text.tokens), 7)
            memory = policy.init(View(torch.zeros(len(own), dtype=torch.int64), states(model, tokens, 0, noise), torch.Tensor))
            for k in range(1, 7):
                view = View(torch.full((len(own),), k), states(model, tokens, k, noise), torch.Tensor)
                verdict, memory = policy.step(view, memory)
                own = np.where(verdict.halt.numpy() & (own > 6), k, own)
            answers = np.stack([model(tokens, int(k), noise)[0].argmax(-1).numpy() for k in range(1, 7)])
            stop = np.minimum(own, 6)
            exits.append(own[scored])
            right.append((answers[stop - 1, np.arange(len(own))] == text.targets)[scored])
    exits, right = np.concatenate(exits), np.concatenate(right)
    assert row["n_tokens"] == len(exits)
    assert row["mean_depth"] == pytest.approx(np.minimum(exits, 6).mean(), abs=1e-12)
    assert row["quality"] == pytest.approx(right.mean(), abs=1e-12)
    assert row["exhausted_fraction"] == pytest.approx((exits >= 6).mean(), abs=1e-12)
    assert row["never_fired_fraction"] == pytest.approx((exits > 6).mean(), abs=1e-12)


def states(model, tokens: torch.Tensor, steps: int, noise: torch.Tensor) -> torch.Tensor:
    from halting_bench.architectures.attention import DenseContext

    context = DenseContext(tokens.shape[1])
    x = model.embed(tokens, context)
    state = model.begin(0, x, noise)
    for _ in range(steps):
        state = model.step(0, state, x, context)
    return state[0]


def test_counts_add_up(run: Run):
    points = run.points[(run.points["status"] == "ok") & (run.points["subset"] == "all")]
    np.testing.assert_allclose(points["core_steps"], points["mean_depth"] * points["n_tokens"])
    assert (points["never_fired_fraction"] <= points["exhausted_fraction"] + 1e-12).all()
    assert (points["quality_lo"] <= points["quality"]).all()
    assert (points["quality"] <= points["quality_hi"]).all()
    by_rule = points.groupby("policy").first()["readouts"] == points.groupby("policy").first()["n_tokens"]
    assert by_rule[["fixed", "latent-diff", "Patient"]].all()  # one readout a token: at the exit
    dear = points[points["policy"].isin(["kl", "argmax-stable", "entropy-and-kl"])]
    assert (dear["readouts"] == dear["core_steps"]).all()  # one readout a step: the rule looks at it


def test_a_uniform_depth_has_the_quality_of_full_depth_at_the_trained_mean(run: Run):
    full = run.points.query("policy == 'fixed' and threshold == 4")
    np.testing.assert_allclose(full["quality"], full["quality_full_depth"])


def test_subsets_partition_the_test_tokens(run: Run):
    fixed = run.points.query("policy == 'fixed' and threshold == 3 and split == 'test'")
    whole = fixed.loc[fixed["subset"] == "all", "n_tokens"].item()
    for family in ("level", "loss-decile"):
        assert fixed.loc[fixed["subset"].str.startswith(f"{family}:"), "n_tokens"].sum() == whole


def test_distinct_points_are_counted_once(run: Run):
    points = run.points.query("status == 'ok' and split == 'test' and subset == 'all'")
    fixed = points[points["policy"] == "fixed"]
    assert fixed["distinct"].all()
    assert not points[points["mean_depth"].isin([1.0, 6.0]) & ~points["policy"].str.match("fixed|random@")]["distinct"].any()


def test_documents_add_up_to_their_point(run: Run):
    keys = ["policy", "threshold", "split"]
    sums = run.per_document.groupby(keys, dropna=False)[["quality_sum", "depth_sum", "n_tokens"]].sum().reset_index()
    points = run.points[run.points["subset"] == "all"].merge(sums, on=keys, suffixes=("", "_sum"))
    assert len(points) == len(sums) > 20
    np.testing.assert_allclose(points["quality"], points["quality_sum"] / points["n_tokens_sum"])
    np.testing.assert_allclose(points["mean_depth"], points["depth_sum"] / points["n_tokens_sum"])


def test_exit_histograms_hold_every_token_of_their_point(run: Run):
    test = run.points[(run.points["split"] == "test") & (run.points["status"] == "ok")]
    for (policy, threshold, subset), exits in run.exits.groupby(["policy", "threshold", "subset"], dropna=False):
        none = pd.isna(threshold)  # a control without one
        here = test["threshold"].isna() if none else test["threshold"] == threshold
        point = test[(test["policy"] == policy) & (test["subset"] == subset) & here].iloc[0]
        steps = np.repeat(exits["step"], exits["count"])
        assert len(steps) == point["n_tokens"]
        assert steps.mean() == pytest.approx(point["mean_depth"])
        assert np.quantile(steps, [0.5, 0.95], method="inverted_cdf").tolist() == [point["depth_p50"], point["depth_p95"]]


def test_a_random_control_has_the_depth_of_its_policy_and_another_quality(run: Run):
    keys = ["policy", "threshold", "split"]
    points = run.points[(run.points["subset"] == "all") & (run.points["status"] == "ok")].set_index(keys)
    ours = points.loc[["latent-diff"]]
    control = points.loc[["random@latent-diff"]]
    np.testing.assert_allclose(control["mean_depth"], ours["mean_depth"])
    assert not np.allclose(control["quality"], ours["quality"])
    assert (control["role"] == "control").all()


def test_a_front_holds_what_nothing_dominates_within_its_group(run: Run):
    points = run.points[(run.points["status"] == "ok") & ~run.points["policy"].str.match("oracle-|random@")]
    for _, group in points.groupby(["subset", "split"]):
        depth, quality = group["mean_depth"].to_numpy(), group["quality"].to_numpy()
        beaten = [
            ((depth <= d) & (quality >= q) & ((depth < d) | (quality > q))).any() for d, q in zip(depth, quality, strict=True)
        ]
        assert group["on_front"].tolist() == [not lost for lost in beaten]


def test_every_rule_has_its_exact_curve_on_both_splits(run: Run):
    assert set(map(tuple, run.curves[["policy", "split"]].values.tolist())) == {
        (policy, split) for policy in ("latent-diff", "kl", "argmax-stable") for split in ("calibration", "test")
    }
    for _, curve in run.curves.groupby(["policy", "split"]):
        assert curve["mean_depth"].iloc[0] == 6
        assert curve["mean_depth"].is_monotonic_decreasing


def test_signals_are_summarised_at_each_step(run: Run):
    told = run.convergence.set_index(["signal", "step"])
    assert (told["p10"] <= told["median"]).all()
    assert (told["median"] <= told["p90"]).all()
    assert ("kl", 1) not in told.index  # not defined there
    assert ("kl", 2) in told.index


# What must change nothing.


@pytest.mark.parametrize(
    "changes",
    [{"batch_tokens": 1}, {"batch_tokens": 100_000}, {"shard_tokens": 1}, {"shard_tokens": 100_000}],
    ids=["single sequences", "one batch", "small shards", "one shard"],
)
def test_batches_and_shards_change_no_point(run: Run, folder: Path, tmp_path: Path, changes: dict):
    other = load_run(sweep(settings(folder, **changes), out=tmp_path / "run"))
    assert_same_points(other.points, run.points)


def test_the_order_of_policies_changes_no_point(run: Run, folder: Path, tmp_path: Path):
    other = load_run(sweep(settings(folder, policies=settings(folder).policies[::-1]), out=tmp_path / "run"))
    assert_same_points(other.points, run.points)


def test_policies_beside_a_policy_change_none_of_its_points(run: Run, folder: Path, tmp_path: Path):
    other = load_run(sweep(settings(folder, policies=("kl",)), out=tmp_path / "run"))
    ours = run.points[run.points["policy"].isin(["kl", "random@kl", "fixed"])]
    loose = ["on_front", "distinct"]  # relations between points
    both = [r.points.drop(columns=loose) for r in (other, run)]
    alone = both[0][(both[0]["subset"] == "all") & both[0]["policy"].isin(ours["policy"])]
    assert_same_points(alone, both[1].loc[ours.index][ours["subset"] == "all"])


def test_the_same_command_gives_the_same_bytes_again(run: Run, folder: Path, tmp_path: Path):
    again = sweep(settings(folder), out=tmp_path / "run")
    assert (again / "points.parquet").read_bytes() == (run.path / "points.parquet").read_bytes()


def test_a_finished_run_is_left_as_it_is_by_the_same_command(run: Run, folder: Path):
    before = (run.path / "points.parquet").read_bytes()
    assert sweep(settings(folder), out=run.path) == run.path
    assert (run.path / "points.parquet").read_bytes() == before


def test_two_seeds_give_honest_oracles_and_one_an_optimistic_one(run: Run, folder: Path, tmp_path: Path):
    both = load_run(sweep(settings(folder, seeds=(0, 1), policies=("kl",)), out=tmp_path / "run"))
    assert set(both.points["seed"]) == {0, 1}
    told = {n: r.points[r.points["policy"] == "oracle-loss"]["params"].unique().tolist() for n, r in ((1, run), (2, both))}
    assert told == {1: ['{"optimistic": true}'], 2: ['{"optimistic": false}']}
    best = [r.points.query("policy == 'oracle-loss' and threshold == 0 and subset == 'all' and seed == 0") for r in (run, both)]
    assert best[0]["mean_depth"].tolist() != best[1]["mean_depth"].tolist()


# What goes wrong.


def break_embedding(folder: Path, byte: str, value: float) -> Path:
    """A copy of the toy whose embedding of one byte is not a number."""
    from halting_bench.architectures.toy import write_toy

    toy = write_toy(folder / "broken-toy")
    tensors = load_file(toy / "model.safetensors")
    tensors["transformer.wte.weight"] = tensors["lm_head.weight"].clone()  # no longer tied: the head stays whole
    tensors["transformer.wte.weight"][ord(byte)] = value
    config = json.loads((toy / "config.json").read_text())
    (toy / "config.json").write_text(json.dumps(config | {"tie_embeddings": False}))
    save_file(tensors, toy / "model.safetensors")
    return toy


@pytest.mark.parametrize("metric", ["accuracy", "bits_per_byte"])
def test_states_that_are_not_numbers_are_counted_and_the_sweep_goes_on(folder: Path, tmp_path: Path, metric: str):
    toy = break_embedding(tmp_path, "j", float("nan"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for i, text in enumerate(("one small text", "a joke", "and another", "juggling jars")):
        (texts / f"{i}.txt").write_text(text)
    benchmark = "shell" if metric == "accuracy" else f"text:{texts}"
    run = load_run(sweep(settings(folder, models=(str(toy),), benchmarks=(benchmark,)), out=tmp_path / "run"))
    points = run.points.query("subset == 'all' and status == 'ok'")
    assert (points["metric"] == metric).all()
    broke = points["nonfinite_fraction"] > 0
    assert broke.any()
    assert (points["nonfinite_fraction"] < 1).any()
    assert (points["exhausted_fraction"] + points["nonfinite_fraction"] <= 1 + 1e-12).all()
    missing = points["quality"].isna()
    assert not missing.any() if metric == "accuracy" else (missing == broke).all()  # missing is NaN, never a stand-in
    assert set(run.points["status"]) == {"ok", "not_applicable"}


FAILING = """
    def step(self, view, state):
        if {when}:
            raise ValueError("no luck")
        return Verdict(view.step >= self.threshold, view.latent[:, 0]), state
"""


def write_failing(path: Path, when: str) -> None:
    head = "from dataclasses import dataclass\nfrom typing import ClassVar\nfrom halting_bench import HaltingPolicy, Verdict\n"
    body = "@dataclass(frozen=True)\nclass Mine(HaltingPolicy):\n    threshold: float\n    thresholds: ClassVar = (2.0, 3.0)\n"
    init = "    def init(self, view):\n        return {}\n"
    path.write_text(f"{head}\n\n{body}\n{init}{FAILING.format(when=when)}", encoding="utf-8")


def test_a_policy_that_raises_is_a_failed_row_and_the_others_are_as_without_it(run: Run, folder: Path, tmp_path: Path):
    write_failing(tmp_path / "mine.py", "self.threshold == 3 and int(view.step[0]) == 2")
    names = (*settings(folder).policies, f"{tmp_path / 'mine.py'}@Mine")
    other = load_run(sweep(settings(folder, policies=names), out=tmp_path / "run"))
    mine = other.points[other.points["policy"] == "Mine"]
    assert mine["status"].tolist() == ["failed"]
    assert mine["error"].item().startswith("ValueError: no luck (mine.py, line ")
    assert_same_points(other.points[other.points["policy"] != "Mine"], run.points)
    assert "no luck" in (other.path / "events.jsonl").read_text()


def test_a_changed_policy_class_is_another_run(folder: Path, tmp_path: Path):
    """Or a sweep would resume over the answers of the code that was there before."""
    config = settings(folder, policies=(f"{tmp_path / 'mine.py'}@Mine",))
    write_failing(tmp_path / "mine.py", "True")
    before = plan_sweep(config).run_id
    assert plan_sweep(config).run_id == before
    write_failing(tmp_path / "mine.py", "False")
    assert plan_sweep(config).run_id != before


def test_a_directory_with_another_run_is_not_written_to(run: Run, folder: Path):
    with pytest.raises(UserError, match=r"holds another run .*choose another --out"):
        sweep(settings(folder, limit=5), out=run.path)


def test_of_two_sweeps_into_one_directory_the_second_says_who_holds_it(folder: Path, tmp_path: Path):
    import os

    with open_run(tmp_path / "run"), pytest.raises(UserError, match=rf"is being written by process {os.getpid()} on "):
        sweep(settings(folder), out=tmp_path / "run")


def test_two_models_of_one_name_are_refused(folder: Path, tmp_path: Path):
    from halting_bench.architectures.toy import write_toy

    other = write_toy(tmp_path / "toy", seed=1)
    config = settings(folder, models=(*settings(folder).models, str(other)))
    with pytest.raises(UserError, match="two parts of this sweep would be kept under 'toy/shell/0'"):
        plan_sweep(config)


def test_the_plan_tells_the_passes_and_the_cells(folder: Path):
    summary = plan_sweep(settings(folder, seeds=(0, 1), benchmarks=("shell", "add"))).summary()
    assert summary["model_passes"] == 4
    assert summary["cells"] == 4 * (6 + 3)
    assert [job["not_applicable"] for job in summary["jobs"]] == [{"gate-cdf": "the model has no halting gate"}] * 2


def test_the_rows_are_sorted_alike_whatever_the_key(run: Run):
    assert not sorted_points(run.points).duplicated(["policy", "threshold", "split", "subset"]).any()


def test_points_csv_holds_the_points(run: Run):
    table = pd.read_csv(run.path / "points.csv")
    assert len(table) == len(run.points)
