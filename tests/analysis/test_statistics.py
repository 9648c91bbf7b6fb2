"""Intervals: do they cover what they say, and do they agree with a bootstrap?"""

import numpy as np
import pytest

from halting_bench.analysis.statistics import mean_interval, paired_difference, ratio_error


def documents(rng: np.random.Generator, trials: int, m: int, probability: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Sums [trials, M] and counts [M] of documents whose tokens share a document effect."""
    counts = rng.integers(5, 60, m)
    effect = rng.normal(size=(trials, m)) * 0.5
    if probability is None:
        return counts * (2 + effect) + rng.normal(size=(trials, m)) * np.sqrt(counts), counts
    rate = np.clip(probability + 0.2 * effect, 0, 1)
    return rng.binomial(counts, rate).astype(float), counts


def coverage(bounded: bool, probability: float | None, m: int, trials: int = 2000) -> float:
    rng = np.random.default_rng(7)
    sums, counts = documents(rng, trials, m, probability)
    if probability is None:
        truth = 2.0
    else:
        effect = rng.normal(size=200_000) * 0.5
        truth = float(np.clip(probability + 0.2 * effect, 0, 1).mean())
    _, low, high = mean_interval(sums, counts, bounded=bounded)
    return float(((low <= truth) & (truth <= high)).mean())


@pytest.mark.parametrize("m", [8, 30, 120])
def test_the_ratio_interval_covers_the_truth_19_times_in_20(m: int):
    assert 0.92 <= coverage(bounded=False, probability=None, m=m) <= 0.975


@pytest.mark.parametrize(("m", "probability"), [(8, 0.5), (30, 0.5), (30, 0.9), (120, 0.97), (120, 0.2)])
def test_the_wilson_interval_covers_the_truth_19_times_in_20(m: int, probability: float):
    assert 0.92 <= coverage(bounded=True, probability=probability, m=m) <= 0.985


def test_the_bounded_interval_stays_inside_and_does_not_collapse_when_all_documents_agree():
    counts = np.full(40, 25)
    for sums, side in ((counts * 1.0, "low"), (counts * 0.0, "high")):
        mean, low, high = mean_interval(sums, counts, bounded=True)
        assert 0 <= low <= mean <= high <= 1
        assert high - low > 0.01
        assert (low < 1) if side == "low" else (high > 0)


def test_equal_documents_of_one_token_give_wilsons_interval_as_scipy_has_it():
    from scipy.stats import binomtest, norm

    sums = np.repeat([1.0, 0.0], [700, 300])
    mean, low, high = mean_interval(sums, np.ones(1000, np.int64), bounded=True)
    wanted = binomtest(700, 1000).proportion_ci(method="wilson")
    assert mean == 0.7
    assert (low, high) == pytest.approx((wanted.low, wanted.high), abs=2e-4)  # t in place of normal quantiles
    assert norm.ppf(0.975) == pytest.approx(1.96, abs=1e-3)


def test_the_paired_difference_agrees_with_a_bootstrap_over_documents():
    from scipy.stats import bootstrap

    rng = np.random.default_rng(3)
    counts = rng.integers(20, 80, 60)
    first = counts * rng.normal(1.0, 0.3, 60)
    second = first - counts * rng.normal(0.05, 0.1, 60)

    def ratio(a: np.ndarray, b: np.ndarray, n: np.ndarray) -> float:
        return float((a - b).sum() / n.sum())

    sampled = bootstrap(
        (first, second, counts), ratio, paired=True, vectorized=False, n_resamples=1500, method="percentile", rng=rng
    )
    difference, low, high = paired_difference(first, second, counts)
    assert difference == pytest.approx(ratio(first, second, counts))
    width = high - low
    assert low == pytest.approx(sampled.confidence_interval.low, abs=0.1 * width)
    assert high == pytest.approx(sampled.confidence_interval.high, abs=0.1 * width)


def test_pairing_removes_what_the_documents_share():
    rng = np.random.default_rng(0)
    counts = np.full(50, 30)
    hard = counts * rng.normal(2, 1, 50)
    _, low, high = paired_difference(hard + counts * 0.01, hard, counts)
    assert (low, high) == (pytest.approx(0.01), pytest.approx(0.01))
    _, alone_low, alone_high = mean_interval(hard, counts, bounded=False)
    assert alone_high - alone_low > 10 * (high - low)


def test_the_standard_error_is_that_of_the_linearised_ratio():
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 9, 12)
    sums = counts * rng.normal(size=12)
    ratio, error = ratio_error(sums, counts)
    q = sums.sum() / counts.sum()
    wanted = np.sqrt(12 / 11 * sum((y - q * n) ** 2 for y, n in zip(sums, counts, strict=True))) / counts.sum()
    assert (ratio, error) == (pytest.approx(q), pytest.approx(wanted))


def test_documents_without_tokens_count_for_nothing():
    sums, counts = np.array([3.0, 5.0, 4.0]), np.array([6, 9, 9])
    padded = np.array([3.0, 0.0, 5.0, 4.0, 0.0]), np.array([6, 0, 9, 9, 0])
    for bounded in (True, False):
        np.testing.assert_allclose(mean_interval(*padded, bounded=bounded), mean_interval(sums, counts, bounded=bounded))
    paired = [paired_difference(s, 0 * s, n) for s, n in (padded, (sums, counts))]
    np.testing.assert_allclose(*paired)


@pytest.mark.parametrize("bounded", [True, False])
def test_one_document_has_a_mean_and_no_interval(bounded: bool):
    mean, low, high = mean_interval(np.array([[3.0, 0.0]]), np.array([4, 0]), bounded=bounded)
    assert mean.tolist() == [0.75]
    assert np.isnan([low, high]).all()
    assert np.isnan(paired_difference(np.array([3.0]), np.array([1.0]), np.array([4]))[1:]).all()


@pytest.mark.parametrize("bounded", [True, False])
def test_a_missing_outcome_is_missing_in_the_mean_not_a_stand_in(bounded: bool):
    sums = np.array([[1.0, np.nan, 2.0], [1.0, 1.0, 2.0]])
    mean, low, high = mean_interval(sums, np.array([4, 4, 4]), bounded=bounded)
    assert np.isnan(mean).tolist() == np.isnan(low).tolist() == np.isnan(high).tolist() == [True, False]
