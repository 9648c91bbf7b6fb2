"""The controls: uniform depths, oracles, random exits, and the sums of a traced unit, each against its slow form."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from toy_traces import STEPS, sequences, signals, toy, whole_trace

from halting_bench.engine.controls import (
    ORACLE_PRICES,
    combined_exits,
    fixed_exits,
    opaque_exits,
    oracle_exits,
    random_sums,
    saturation_exits,
    uniform_at,
)
from halting_bench.engine.points import (
    RowCost,
    TracedUnit,
    choose_thresholds,
    grid_bounds,
    replay_exits,
    replay_thresholds,
)
from halting_bench.engine.replay import Combination, Rule, exits_at, running_extremum
from halting_bench.engine.trace import TracePlan, trace
from halting_bench.errors import PolicyFailed
from halting_bench.records import Metric
from halting_bench.store import Arrays, write_arrays

R = STEPS["huginn"]
COST = RowCost(embed=(5.0, 0.5), step=(7.0, 0.25), readout=(3.0, 0.125))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six sequences of three documents, in three shards that cut through a document."""
    folder, texts = tmp_path_factory.mktemp("shards"), sequences(6)
    paths = []
    for i, part in enumerate((texts[:1], texts[1:4], texts[4:])):
        paths.append(folder / f"{i}.safetensors")
        write_arrays(paths[-1], trace(toy("huginn"), part, TracePlan(signals("huginn"), R, 3)))
    return paths


def unit(shards: list[Path], metric: Metric = Metric.BITS_PER_BYTE, calibration: int = 1) -> TracedUnit:
    return TracedUnit(shards, [11, 10, 12], calibration, metric, COST, mean=4)


def column(shards: list[Path], name: str) -> np.ndarray:
    return np.concatenate([Arrays(path)[name] for path in shards])


@pytest.mark.parametrize("metric", list(Metric))
def test_a_unit_sums_its_shards_by_document_in_sample_order(shards: list[Path], metric: Metric):
    traced = unit(shards, metric)
    document = column(shards, "document")
    outcome = column(shards, "correct").astype(float) if metric is Metric.ACCURACY else column(shards, "loss") / np.log(2)
    assert traced.counts.tolist() == [(document == d).sum() for d in (11, 10, 12)]
    wanted = np.stack([outcome[document == d].sum(axis=0) for d in (11, 10, 12)], axis=1)
    np.testing.assert_allclose(traced.uniform, wanted)
    assert traced.in_split("calibration").tolist() == [True, False, False]
    assert traced.in_split("test").tolist() == [False, True, True]
    np.testing.assert_allclose(
        traced.context_sums, [(column(shards, "position")[document == d] + 1).sum() for d in (11, 10, 12)]
    )


def test_flops_are_counted_row_by_row(shards: list[Path]):
    traced = unit(shards)
    document, context = column(shards, "document"), column(shards, "position") + 1.0
    rule = Rule("kl", "below")
    scores = column(shards, "score/kl")
    threshold = float(np.nanmedian(scores))
    step = traced.watched_step(True, 11.0)
    assert step == (7.0 + 3.0 + 11.0, 0.25 + 0.125)
    tallies = replay_thresholds(traced, rule, np.array([threshold]), step)
    stop = np.minimum(exits_at(running_extremum(scores, rule), threshold), R)
    mine = document != 11
    np.testing.assert_allclose(tallies["test"].step_flops[0], (stop * (step[0] + step[1] * context))[mine].sum())
    np.testing.assert_allclose(traced.base_flops(True, "test"), (5.0 + 0.5 * context)[mine].sum())
    np.testing.assert_allclose(traced.base_flops(False, "test"), (8.0 + 0.625 * context)[mine].sum())


def test_thresholds_and_exits_replay_alike_over_shards(shards: list[Path]):
    traced, rule = unit(shards), Rule("latent-diff", "below", hits=2)
    scores = column(shards, "score/latent-diff")
    bounds = np.quantile(scores, [0.1, 0.5, 0.9])
    found = replay_thresholds(traced, rule, bounds, (1.0, 0.0))

    def exits(number: int, shard: Arrays) -> np.ndarray:
        return np.stack([exits_at(running_extremum(shard["score/latent-diff"], rule), b) for b in bounds])

    wanted = replay_exits(traced, exits, (1.0, 0.0))
    for split in ("calibration", "test"):
        for name, value in vars(wanted[split]).items():
            np.testing.assert_allclose(vars(found[split])[name].astype(float), value.astype(float), rtol=1e-10, err_msg=name)


def test_uniform_depths_are_every_depth(shards: list[Path]):
    tallies = replay_exits(unit(shards), fixed_exits(R), (1.0, 0.0))
    for split in ("calibration", "test"):
        tally = tallies[split]
        n = tally.histogram.sum(axis=1)
        np.testing.assert_array_equal(tally.histogram, np.diag(n))
        np.testing.assert_allclose(tally.quality.sum(), np.stack(list(tally.quality)).sum())
    np.testing.assert_allclose(tallies["calibration"].quality + tallies["test"].quality, unit(shards).uniform)


def test_the_oracle_takes_the_cheapest_sum_of_loss_and_price(shards: list[Path]):
    loss = column(shards, "loss")
    exits = np.concatenate([oracle_exits(None)(i, Arrays(path)) for i, path in enumerate(shards)], axis=1)
    for price, row in zip(ORACLE_PRICES, exits, strict=True):
        assert row.tolist() == [int(np.argmin([loss[n, k] + price * (k + 1) for k in range(R)])) + 1 for n in range(len(loss))]
    depths = exits.mean(axis=1)
    assert all(dear <= cheap for cheap, dear in pairwise(depths))


def test_no_rule_beats_the_oracle_of_its_own_draw(shards: list[Path]):
    best = column(shards, "loss").min(axis=1).mean()
    oracle = replay_exits(unit(shards), oracle_exits(None), (1.0, 0.0))
    total = sum(oracle[split].quality[0].sum() for split in oracle) * np.log(2) / len(column(shards, "loss"))
    np.testing.assert_allclose(total, best)


def test_an_oracle_that_chooses_on_another_draw_reads_that_draws_losses(shards: list[Path], tmp_path: Path):
    paths = []
    for i, part in enumerate((sequences(6)[:1], sequences(6)[1:4], sequences(6)[4:])):
        paths.append(tmp_path / f"{i}.safetensors")
        write_arrays(paths[-1], trace(toy("huginn"), part, TracePlan((), R, 4)))
    exits = oracle_exits(unit(paths))(1, Arrays(shards[1]))
    assert exits[0].tolist() == (Arrays(paths[1])["loss"].argmin(axis=1) + 1).tolist()
    assert exits[0].tolist() != (Arrays(shards[1])["loss"].argmin(axis=1) + 1).tolist()


def test_saturation_exits_are_the_recorded_ones(shards: list[Path]):
    assert saturation_exits(0, Arrays(shards[0])).tolist() == [Arrays(shards[0])["saturation"].tolist()]


def test_random_exits_have_the_expectation_of_many_draws(shards: list[Path]):
    traced, rule = unit(shards), Rule("kl", "below")
    bound = np.array([float(np.nanmedian(column(shards, "score/kl")))])
    histogram = replay_thresholds(traced, rule, bound, (1.0, 0.0))["test"].histogram
    quality, depth = random_sums(histogram, traced.uniform, traced.counts)
    rng, document = np.random.default_rng(0), column(shards, "document")
    outcome = column(shards, "loss") / np.log(2)
    drawn = rng.choice(np.arange(1, R + 1), size=(4000, len(document)), p=histogram[0] / histogram.sum())
    sampled = outcome[np.arange(len(document)), drawn - 1]
    for place, d in enumerate((11, 10, 12)):
        sums = sampled[:, document == d].sum(axis=1)
        assert abs(sums.mean() - quality[0, place]) < 5 * sums.std() / np.sqrt(len(sums))
        steps = drawn[:, document == d].sum(axis=1)
        assert abs(steps.mean() - depth[0, place]) < 5 * steps.std() / np.sqrt(len(steps))


def test_the_uniform_curve_is_linear_between_integers_and_flat_outside():
    uniform = np.array([[10.0], [6.0], [5.0]])
    found = uniform_at(np.array([0.5, 1.0, 1.5, 2.25, 3.0, 9.0]), uniform)
    np.testing.assert_allclose(found[:, 0], [10.0, 10.0, 8.0, 5.75, 5.0, 5.0])


def test_a_recorded_failure_is_raised_with_the_policys_own_error(tmp_path: Path):
    write_arrays(tmp_path / "x.safetensors", {"error/mine@1.0": np.frombuffer(b"ValueError: no luck", np.uint8)})
    with pytest.raises(PolicyFailed, match=r"^ValueError: no luck$"):
        opaque_exits(["mine@1.0"])(0, Arrays(tmp_path / "x.safetensors"))


def test_combined_exits_are_those_of_each_threshold(shards: list[Path]):
    shard = Arrays(shards[1])
    combination = Combination((Rule("kl", "below"), Rule("max-prob", "above")), (None, 0.04), every_rule=False)
    exits = combined_exits(combination, [0.01, 0.1])(1, shard)
    assert exits.tolist() == [combination.exits(lambda s: shard[f"score/{s}"], t).tolist() for t in (0.01, 0.1)]


@pytest.mark.parametrize("metric", list(Metric))
def test_the_iso_threshold_is_the_least_depth_at_full_depth_quality_on_calibration(
    shards: list[Path], tmp_path: Path, metric: Metric
):
    traced, rule = unit(shards, metric, calibration=2), Rule("latent-diff", "below")
    choice = choose_thresholds(traced, rule, 4, tmp_path)
    mine = column(shards, "document") != 12
    extremum = running_extremum(column(shards, "score/latent-diff"), rule)[mine]
    outcome = (column(shards, "correct").astype(float) if metric is Metric.ACCURACY else column(shards, "loss") / np.log(2))[
        mine
    ]
    sign = 1 if metric.higher_is_better else -1
    least = sign * outcome[:, traced.mean - 1].mean() - metric.tolerance

    def at(bound: float) -> tuple[float, float]:
        stop = np.minimum(exits_at(extremum, bound), R)
        return float(stop.mean()), sign * float(outcome[np.arange(len(stop)), stop - 1].mean())

    every = [at(np.nextafter(e, np.inf)) for e in np.unique(extremum[:, :-1])]
    good = [depth for depth, quality in every if quality >= least - 1e-12]
    assert (choice.iso is not None) == bool(good)
    if choice.iso is not None:
        assert at(choice.iso)[0] == pytest.approx(min(good))
    bounds = grid_bounds(rule, (0.3, 0.1), choice, traced.dtype)
    assert (np.diff(bounds) > 0).all()
    assert {0.3, 0.1} <= set(bounds.tolist())
    assert len(bounds) <= 2 + 4 + 1
    for split, curve in choice.curves.items():
        assert curve.mean_depth[0] == R, split
        assert (np.diff(curve.mean_depth) < 0).all()


def test_rows_that_broke_choose_no_threshold_but_are_counted(tmp_path: Path):
    columns = dict(whole_trace("huginn"))
    columns["last_step"] = columns["last_step"].copy()
    columns["last_step"][::3] = 2
    columns["loss"] = np.where(np.arange(1, R + 1) >= columns["last_step"][:, None], np.nan, columns["loss"])
    write_arrays(tmp_path / "x.safetensors", columns)
    traced = TracedUnit([tmp_path / "x.safetensors"], [10, 11, 12], 1, Metric.ACCURACY, COST, mean=4)
    choice = choose_thresholds(traced, Rule("kl", "below"), 4, tmp_path)
    assert all(np.isfinite(curve.quality).all() for curve in choice.curves.values())
    tallies = replay_thresholds(traced, Rule("kl", "below"), np.array([-1.0]), (1.0, 0.0))
    assert sum(tally.nonfinite[0] for tally in tallies.values()) == (columns["last_step"] == 2).sum()
