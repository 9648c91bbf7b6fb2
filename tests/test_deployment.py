from dataclasses import replace

import pytest

from halting_bench.catalog import PolicyRecipe, RuleSpec
from halting_bench.deployment import huginn_arguments, ouro_arguments, read_deployment, write_deployment
from halting_bench.errors import UserError
from halting_bench.halting.policies import FixedDepth, ThresholdPolicy
from halting_bench.recommend import Budget, recommend
from tests.analysis.simulated_run import Simulated, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), Simulated(documents=600, tokens=12))


def recipe(**fields):
    return PolicyRecipe(name="mine", source="test", **fields)


def test_the_recommended_policy_survives_its_file_and_becomes_a_live_one(run, tmp_path):
    chosen = recommend(run, 0.05, 0.9)
    write_deployment(tmp_path / "deployment.yaml", chosen)
    again = read_deployment(tmp_path / "deployment.yaml")
    assert again == chosen
    assert again.policy() == ThresholdPolicy("latent-diff", chosen.threshold)
    assert again.certificate.policies_compared == 3
    assert again.huginn == {"criterion": "latent-diff", "exit_threshold": chosen.threshold, "min_steps": 0, "num_steps": 12}


def test_a_policy_is_not_applied_to_a_model_it_was_not_chosen_for(run):
    chosen = recommend(run, 0.05, 0.9)
    chosen.check_model("aaaa")
    with pytest.raises(UserError, match="do not carry over"):
        chosen.check_model("cccc")


def test_a_budget_is_held_and_decides_what_is_made_least(run):
    by_depth = recommend(run, 0.05, 0.9)
    assert recommend(run, 0.05, 0.9, budget=Budget(flops=1e9)).threshold == by_depth.threshold
    with pytest.raises(UserError, match="raise the budget or --max-loss"):
        recommend(run, 0.05, 0.9, budget=Budget(mean_depth=1.01))
    with pytest.raises(UserError, match="was not timed"):
        recommend(run, 0.05, 0.9, budget=Budget(ms=1.0))


def test_nothing_certified_is_an_error_that_says_what_it_would_take(run):
    with pytest.raises(UserError, match="needs at least"):
        recommend(run, 0.0001, 0.9)


def test_a_run_of_several_benchmarks_must_be_told_which(run):
    several = replace(
        run, points=run.points.assign(benchmark=["docs", "shell"] * (len(run.points) // 2) + ["docs"] * (len(run.points) % 2))
    )
    with pytest.raises(UserError, match="name one with --benchmark"):
        recommend(several, 0.05, 0.9)


def test_uniform_depth_is_expressed_as_a_number_of_steps(run):
    chosen = recommend(run, 0.05, 0.9)
    assert chosen.model_copy(update={"recipe": None, "threshold": 4.0}).policy() == FixedDepth(4)
    assert huginn_arguments(None, 4.0, 12) == {"criterion": "none", "num_steps": 4}


@pytest.mark.parametrize(
    "fields",
    [
        {"signal": "kl", "hits": 2},
        {"signal": "kl", "every": 2},
        {"signal": "step-norm"},
        {"all_of": (RuleSpec(signal="kl"),), "grid": {"absolute": (1.0,)}},
    ],
)
def test_what_huginn_cannot_express_has_no_arguments(fields):
    assert huginn_arguments(recipe(**fields), 0.1, 8) is None


def test_huginn_counts_its_first_check_from_zero_and_its_stable_argmax_in_whole_steps():
    assert huginn_arguments(recipe(signal="argmax-stable", min_steps=3), 5.0, 8) == {
        "criterion": "argmax-stability", "exit_threshold": 5, "min_steps": 2, "num_steps": 8,
    }  # fmt: skip


def test_only_ouros_own_rule_is_its_exit_threshold():
    assert ouro_arguments(recipe(signal="gate-cdf"), 0.5) == {"exit_threshold": 0.5}
    assert ouro_arguments(recipe(signal="gate-cdf", min_steps=2), 0.5) is None
    assert ouro_arguments(recipe(signal="kl"), 0.5) is None


def test_a_misspelt_key_of_a_deployment_file_is_named(tmp_path):
    (tmp_path / "d.yaml").write_text("modle: x\n")
    with pytest.raises(UserError, match="model"):
        read_deployment(tmp_path / "d.yaml")
