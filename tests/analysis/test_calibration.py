import math
import shutil
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binom

from halting_bench.analysis.calibration import Promise, certified, fastest_certified, hoeffding_bentkus
from halting_bench.calibrate import calibrate
from halting_bench.errors import UserError
from halting_bench.reporting.calibration import calibration_tables
from halting_bench.reporting.exports import render
from halting_bench.store import load_run
from tests.analysis.simulated_run import Simulated, write_run

DRAWS = 500


def allowed(error: float) -> float:
    return error + 3 * math.sqrt(error * (1 - error) / DRAWS)


def risks_of(documents: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Losses [G, M] of thresholds from strict to loose, one document's correlated, and their true means."""
    truth = np.linspace(0.0, 0.2, 15)
    hard = rng.beta(0.4, 1.6, documents)  # mean 0.2
    return np.clip(truth[:, None] / 0.2, 0, 1) * hard, truth


def test_a_certified_threshold_breaks_its_promise_no_more_often_than_promised():
    promise, rng = Promise(0.1, 0.9, 1.0), np.random.default_rng(0)
    broken = 0
    for _ in range(DRAWS):
        loss, truth = risks_of(200, rng)
        pilot, _ = risks_of(30, rng)
        best, _ = fastest_certified(loss, pilot, np.linspace(12, 4, len(truth)), promise)
        broken += best is not None and truth[best] > promise.max_loss
    assert broken / DRAWS <= allowed(promise.error)


def test_the_best_of_several_calibrated_policies_keeps_the_promise_when_the_confidence_is_split():
    promise, rng = Promise(0.1, 0.9, 1.0), np.random.default_rng(1)
    own = promise.shared(5)
    broken = found = 0
    for _ in range(DRAWS):
        picked = []
        for _ in range(5):
            loss, truth = risks_of(200, rng)
            pilot, _ = risks_of(30, rng)
            depth = np.linspace(12, 4, len(truth))
            best, _ = fastest_certified(loss, pilot, depth, own)
            if best is not None:
                picked.append((depth[best], truth[best]))
        found += bool(picked)
        broken += bool(picked) and min(picked)[1] > promise.max_loss
    assert found == DRAWS
    assert broken / DRAWS <= allowed(promise.error)


def test_without_splitting_the_confidence_the_best_of_many_at_the_edge_would_break_it():
    """The test above can fail: twelve policies, all just above the level, each certified on its own."""
    promise, rng = Promise(0.1, 0.9, 1.0), np.random.default_rng(2)
    level = 0.1001
    alone = sum(certified((rng.random((1, 100)) < level) * 1.0, promise) for _ in range(DRAWS)) / DRAWS
    best = sum(any(certified((rng.random((1, 100)) < level) * 1.0, promise) for _ in range(12)) for _ in range(DRAWS)) / DRAWS
    assert alone <= allowed(promise.error) < best


def test_p_values_are_the_smaller_of_both_bounds():
    found = hoeffding_bentkus(np.array([0.0, 0.02, 0.5]), 100, 0.1)
    divergence = 0.02 * math.log(0.02 / 0.1) + 0.98 * math.log(0.98 / 0.9)
    assert found[0] == pytest.approx(0.9**100)
    assert found[1] == pytest.approx(min(math.exp(-100 * divergence), math.e * binom.cdf(2, 100, 0.1)))
    assert found[2] == 1.0


def test_a_mean_that_rounds_up_does_not_cost_a_document():
    exact = hoeffding_bentkus(np.array([float(Fraction(7, 100))]), 100, 0.2)
    noisy = hoeffding_bentkus(np.array([np.nextafter(0.07, 1)]), 100, 0.2)
    assert noisy == pytest.approx(exact, rel=1e-9)


def test_testing_stops_at_the_first_threshold_that_fails():
    promise = Promise(0.1, 0.9, 1.0)
    risk = np.array([np.zeros(100), np.ones(100), np.zeros(100)])
    assert certified(risk, promise) == 1


def test_the_fewest_documents_are_those_with_which_a_lossless_threshold_passes():
    promise = Promise(0.01, 0.9, 1.0)
    needed = promise.documents_needed()
    assert needed == 230
    assert certified(np.zeros((1, needed)), promise) == 1
    assert certified(np.zeros((1, needed - 1)), promise) == 0


def test_a_loss_that_is_not_a_number_counts_as_the_worst():
    assert Promise(0.1, 0.9, 0.5).risk(np.array([np.nan, 0.25, 9.0, -1.0])).tolist() == [1.0, 0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    "values",
    [(0.0, 0.9, 1.0), (0.1, 1.0, 1.0), (0.1, 0.9, 0.1), (math.nan, 0.9, 1.0), (0.1, math.nan, 1.0), (0.1, 0.9, math.inf)],
)
def test_a_promise_that_means_nothing_is_refused_with_what_to_type(values):
    with pytest.raises(UserError, match="--"):
        Promise(*values)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), Simulated(documents=400, tokens=12))


def test_every_policy_of_a_run_is_calibrated_and_both_sides_are_reported(run):
    frame = calibrate(run, 0.05, 0.9).set_index("policy")
    assert list(frame.index) == ["fixed", "latent-diff", "kl"]
    assert (frame["status"] == "certified").all()
    assert frame.loc["fixed", "threshold"] == round(frame.loc["fixed", "mean_depth_test"])
    assert (frame["clipped_loss_calibration"] <= 0.05).all()
    assert frame.loc["latent-diff", "mean_depth_test"] < frame.loc["fixed", "mean_depth_test"]
    assert frame["loss_test"].between(frame["loss_test_lo"], frame["loss_test_hi"]).all()


def test_a_stricter_promise_is_never_faster(run):
    loose, strict = (calibrate(run, loss, 0.9, policies=["kl"])["mean_depth_test"].iloc[0] for loss in (0.1, 0.05))
    assert strict >= loose


def test_the_best_of_all_is_promised_to_each_with_its_share_of_the_confidence(run):
    frame = calibrate(run, 0.05, 0.9, best_of_all=True)
    assert frame["own_confidence"].tolist() == pytest.approx([1 - 0.1 / 3] * 3)


def test_too_few_documents_say_how_many_are_needed(run):
    frame = calibrate(run, 0.001, 0.9)
    assert (frame["status"] == "not certified").all()
    assert frame["error"].str.contains("needs at least 1151").all()
    text = render(calibration_tables(frame)[0], "md")
    assert "cannot certify" in text


def test_a_run_without_its_trace_prints_the_command_that_records_it(run, tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(run.path, folder, ignore=shutil.ignore_patterns("trace"))
    with pytest.raises(UserError, match=r"halting-bench sweep --benchmark docs --model demo .*--keep-trace --out"):
        calibrate(load_run(folder), 0.05, 0.9)


def test_an_unknown_policy_suggests_the_nearest(run):
    with pytest.raises(UserError, match="did you mean 'latent-diff'"):
        calibrate(run, 0.05, 0.9, policies=["latent-dif"])
