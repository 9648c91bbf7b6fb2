"""Laws of replay: it equals a live run that never freezes, and its fast sums equal the obvious ones."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from toy_traces import STEPS, applicable, between_scores, free_signal, live, plan, sequences, signals, toy, whole_trace

from halting_bench.engine.replay import (
    Combination,
    Rows,
    Rule,
    Tally,
    exits_at,
    halting_steps,
    recorded_threshold,
    running_extremum,
    signed_threshold,
    tally_exits,
    tally_thresholds,
    unsigned_threshold,
)
from halting_bench.halting.policies import AllOf, AnyOf, FixedDepth, ThresholdPolicy
from halting_bench.halting.signals import SIGNALS
from halting_bench.plan import build_policy

SHARES = (0.15, 0.5, 0.85)


def replayed(model: str, rule: Rule, threshold: float) -> np.ndarray:
    scores = whole_trace(model)[f"score/{rule.signal}"]
    return exits_at(running_extremum(scores, rule), signed_threshold(np.array([threshold]), rule, scores.dtype)[0])


def assert_live(model: str, policy, exits: np.ndarray) -> None:
    steps, shard = STEPS[model], whole_trace(model)
    found = live(toy(model), sequences(), policy, steps)
    np.testing.assert_array_equal(exits, found.exits)
    loss = shard["loss"][np.arange(len(exits)), np.minimum(exits, steps) - 1]
    np.testing.assert_allclose(loss, found.loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("model", "recipe"), applicable())
def test_a_recipe_replays_as_it_runs_live(model, recipe):
    planned, shard = plan(model, recipe), whole_trace(model)
    scores, closed = shard[f"score/{free_signal(planned)}"], SIGNALS[free_signal(planned)].closed
    exits = []
    for threshold in between_scores(scores, (0.1, 0.9) if closed else SHARES):
        if planned.rule:
            exits.append(replayed(model, planned.rule, threshold))
        else:
            exits.append(planned.combination.exits(lambda signal: shard[f"score/{signal}"], threshold))
        assert_live(model, build_policy(planned.recipe, threshold), exits[-1])
    assert len(np.unique(np.stack(exits))) > 1


@pytest.mark.parametrize("gates", [(2, 1, 1), (3, 4, 1), (1, 5, 2), (2, 2, 3), (2, 1, 2), (1, 1, 5)])
@pytest.mark.parametrize(
    ("model", "signal"), [("huginn", "kl"), ("huginn", "argmax-stable"), ("ouro", "gate-cdf"), ("ouro", "cosine")]
)
def test_hits_min_steps_and_every_replay_as_they_run_live(model, signal, gates):
    rule = Rule(signal, SIGNALS[signal].fires, SIGNALS[signal].closed, *gates)
    threshold = between_scores(whole_trace(model)[f"score/{signal}"], (0.6 if rule.fires == "below" else 0.4,))[0]
    assert_live(model, ThresholdPolicy(signal, threshold, *gates), replayed(model, rule, threshold))


@pytest.mark.parametrize("every_rule", [True, False])
@pytest.mark.parametrize("model", STEPS)
def test_any_of_and_all_of_replay_as_they_run_live(model, every_rule):
    shard = whole_trace(model)
    first, second, third = (
        Rule("kl", "below", False, 2),
        Rule("max-prob", "above"),
        Rule("latent-diff", "below", every=2, min_steps=3),
    )
    rules = (first, second, third)
    thresholds = tuple(between_scores(shard[f"score/{r.signal}"], (0.6 if r.fires == "below" else 0.4,))[0] for r in rules)
    combination = Combination(rules, (thresholds[0], None, thresholds[2]), every_rule)
    policies = tuple(ThresholdPolicy(r.signal, t, r.hits, r.min_steps, r.every) for r, t in zip(rules, thresholds, strict=True))
    exits = combination.exits(lambda signal: shard[f"score/{signal}"], thresholds[1])
    assert_live(model, (AllOf if every_rule else AnyOf)(policies), exits)


@pytest.mark.parametrize("model", STEPS)
def test_a_fixed_depth_replays_as_the_plain_forward(model):
    import torch

    from halting_bench.architectures.noise import initial_noise

    shard, steps = whole_trace(model), STEPS[model]
    for depth in range(1, steps + 1):
        assert_live(model, FixedDepth(depth), np.full(len(shard["loss"]), depth))
    for text in sequences():
        noise = initial_noise(3, np.full((1, 1), text.uid), np.arange(len(text.tokens))[None], toy(model).spec.width)
        mine = shard["sequence"] == text.uid
        for depth in (1, 3, steps):
            logits = toy(model)(torch.from_numpy(text.tokens)[None], depth, noise)[0]
            log_p = torch.log_softmax(logits, dim=-1).numpy()
            wanted = -log_p[shard["position"][mine], shard["target"][mine]]
            np.testing.assert_allclose(shard["loss"][mine, depth - 1], wanted, rtol=0, atol=1e-10)
            np.testing.assert_array_equal(
                shard["correct"][mine, depth - 1], log_p.argmax(-1)[shard["position"][mine]] == shard["target"][mine]
            )


@pytest.mark.parametrize(("model", "signal"), [(m, s) for m in STEPS for s in signals(m)])
def test_a_threshold_that_is_never_true_exhausts_every_row(model, signal):
    shard, steps = whole_trace(model), STEPS[model]
    rule = Rule(signal, SIGNALS[signal].fires, SIGNALS[signal].closed)
    never = np.array([-1.0 if rule.fires == "below" else 1e9])
    tally = tally_thresholds(
        running_extremum(shard[f"score/{signal}"], rule), signed_threshold(never, rule, np.dtype(float)), toy_rows(model), 3
    )
    n = len(shard["loss"])
    assert tally.depth.sum() == n * steps
    assert (tally.halted[0], tally.never[0], tally.nonfinite[0]) == (0, n, 0)
    assert tally.histogram[0].tolist() == [0] * (steps - 1) + [n]
    np.testing.assert_allclose(tally.quality.sum(), shard["loss"][:, -1].sum(), rtol=1e-12)


def toy_rows(model: str) -> Rows:
    shard = whole_trace(model)
    n = len(shard["loss"])
    return Rows(np.arange(n), shard["loss"], shard["document"] - 10, shard["last_step"].astype(np.int64), np.full(n, 7.0))


@pytest.mark.parametrize(("model", "signal"), [(m, s) for m in STEPS for s in signals(m)])
@pytest.mark.parametrize("gates", [(1, 1, 1), (2, 3, 2)])
def test_on_a_fixed_trace_a_stricter_threshold_never_exits_earlier(model, signal, gates):
    rule = Rule(signal, SIGNALS[signal].fires, SIGNALS[signal].closed, *gates)
    seen = whole_trace(model)[f"score/{signal}"]
    grid = np.unique(seen[np.isfinite(seen)])
    exits = [replayed(model, rule, float(t)) for t in (grid if rule.fires == "below" else grid[::-1])]
    for strict, loose in pairwise(exits):
        assert (loose <= strict).all()


# Anything at all: NaN, ties, infinities, -0.0, float32, rows that break.

VALUES = st.sampled_from([0.0, -0.0, 0.5, 1.0, 1.0 + 1e-7, 2.0, np.nan, np.inf, -np.inf])


@st.composite
def cases(draw, broken: bool = True):
    n, steps, documents = draw(st.integers(0, 7)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    scores = draw(arrays(np.float64, (n, steps), elements=VALUES)).astype(dtype)
    outcome = draw(arrays(np.float64, (n, steps), elements=st.sampled_from([0.0, 1.0, 0.25])))
    last = draw(arrays(np.int64, n, elements=st.integers(1, steps + 1 if broken else 1))) if broken else np.full(n, steps + 1)
    document = draw(arrays(np.int64, n, elements=st.integers(0, documents - 1)))
    outcome = np.where(np.arange(1, steps + 1) >= last[:, None], np.nan, outcome)
    rule = Rule(
        "any",
        draw(st.sampled_from(["below", "above"])),
        draw(st.booleans()),
        draw(st.integers(1, 3)),
        draw(st.integers(1, steps)),
        draw(st.integers(1, 3)),
    )
    thresholds = np.array(draw(st.lists(st.sampled_from([-1.0, 0.0, 0.3, 0.5, 1.0, 1.5, 2.0, 9.0]), min_size=1, max_size=5)))
    rows = Rows(np.arange(n) + 4, outcome, document, last, np.arange(1.0, n + 1))
    return scores, rule, thresholds, rows, documents


def by_hand(row: np.ndarray, rule: Rule, threshold: float) -> int:
    """The first step at which a rule fires, as it is described."""
    limit, hits = row.dtype.type(threshold), 0
    for k in range(rule.every, len(row) + 1, rule.every):
        score = row[k - 1]
        good = score < limit if rule.fires == "below" else score > limit
        hits = hits + 1 if good or (rule.closed and score == limit) else 0
        if hits >= rule.hits and k >= rule.min_steps:
            return k
    return len(row) + 1


@given(cases())
def test_exits_are_those_of_the_rule_by_hand(case):
    scores, rule, thresholds, _, _ = case
    for threshold in thresholds:
        wanted = [by_hand(row, rule, threshold) for row in scores]
        bound = signed_threshold(np.array([threshold]), rule, scores.dtype)[0]
        assert exits_at(running_extremum(scores, rule), bound).tolist() == wanted
        halts = halting_steps(scores, rule, threshold)
        assert [int(h.argmax()) + 1 if h.any() else scores.shape[1] + 1 for h in halts] == wanted


def assert_tallies(found: Tally, wanted: Tally) -> None:
    for name, value in vars(wanted).items():
        if value.dtype == np.float64:
            np.testing.assert_allclose(vars(found)[name], value, rtol=1e-12, atol=1e-12, err_msg=name)
        else:
            np.testing.assert_array_equal(vars(found)[name], value, err_msg=name)
        assert vars(found)[name].dtype == value.dtype, name


@given(cases())
def test_every_threshold_at_once_sums_what_explicit_exits_sum(case):
    scores, rule, thresholds, rows, documents = case
    bounds = np.sort(signed_threshold(thresholds, rule, scores.dtype))
    extremum = running_extremum(scores, rule)
    exits = np.stack([exits_at(extremum, bound) for bound in bounds])
    assert_tallies(tally_thresholds(extremum, bounds, rows, documents), tally_exits(exits, rows, documents))


@given(cases())
def test_explicit_exits_sum_what_a_plain_loop_sums(case):
    scores, rule, thresholds, rows, documents = case
    steps = scores.shape[1]
    exits = np.array([[by_hand(row, rule, t) for row in scores] for t in thresholds]).reshape(len(thresholds), len(scores))
    tally = tally_exits(exits, rows, documents)
    for g in range(len(thresholds)):
        counts = dict.fromkeys(("halted", "never", "nonfinite"), 0)
        quality, depth, flops = np.zeros(documents), np.zeros(documents, int), 0.0
        for n, exit_step in enumerate(exits[g]):
            stop = int(min(exit_step, steps, rows.last_step[n]))
            broke = rows.last_step[n] <= min(exit_step, steps)
            counts["nonfinite"] += broke
            counts["halted"] += stop < steps and not broke
            counts["never"] += exit_step > steps and not broke
            quality[rows.document[n]] += rows.outcome[n, stop - 1]
            depth[rows.document[n]] += stop
            flops += stop * rows.step_flops[n]
        np.testing.assert_allclose(tally.quality[g], quality)
        assert tally.depth[g].tolist() == depth.tolist()
        assert tally.step_flops[g] == flops
        assert {name: getattr(tally, name)[g] for name in counts} == counts


@given(cases(), st.integers(0, 7))
def test_adding_two_tallies_adds_their_rows(case, cut):
    scores, rule, thresholds, rows, documents = case
    bounds = np.sort(signed_threshold(thresholds, rule, scores.dtype))
    extremum, first = running_extremum(scores, rule), np.arange(len(scores)) < cut
    total = tally_thresholds(extremum[first], bounds, rows.take(first), documents)
    total.add(tally_thresholds(extremum[~first], bounds, rows.take(~first), documents))
    assert_tallies(total, tally_thresholds(extremum, bounds, rows, documents))


@given(cases(broken=False))
def test_equal_exits_have_equal_fingerprints_and_others_do_not(case):
    scores, rule, thresholds, rows, documents = case
    bounds = np.sort(signed_threshold(thresholds, rule, scores.dtype))
    extremum, steps = running_extremum(scores, rule), scores.shape[1]
    tally = tally_thresholds(extremum, bounds, rows, documents)
    stops = [tuple(np.minimum(exits_at(extremum, bound), steps)) for bound in bounds]
    for a in range(len(bounds)):
        for b in range(a):
            assert (stops[a] == stops[b]) == (tally.fingerprint[a] == tally.fingerprint[b])


@given(cases())
def test_the_running_extremum_never_rises(case):
    scores, rule, _, _, _ = case
    extremum = running_extremum(scores, rule)
    assert (extremum[:, 1:] <= extremum[:, :-1]).all()
    assert not np.isnan(extremum).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("fires", ["below", "above"])
def test_a_signed_threshold_comes_back_as_it_was_given(fires, closed, dtype):
    rule = Rule("any", fires, closed)
    given_ = np.array([1e-6, 0.03, 1.0, 5.0], dtype)
    np.testing.assert_array_equal(unsigned_threshold(signed_threshold(given_, rule, np.dtype(dtype)), rule), given_)


def test_scores_are_not_written_to():
    scores = np.array([[1.0, np.nan, 0.5]])
    before = scores.copy()
    for hits in (1, 2):
        running_extremum(scores, dataclasses.replace(Rule("any", "below"), hits=hits))
    np.testing.assert_array_equal(scores, before)


def test_a_recorded_threshold_is_what_was_typed_and_gives_its_bound_back():
    rule = Rule("x", "below")
    typed = np.array([0.03, 1e-5, 5e-4, 0.1, 7.25])
    bounds = signed_threshold(typed, rule, np.dtype(np.float32))
    np.testing.assert_array_equal(recorded_threshold(bounds, rule), typed)
    np.testing.assert_array_equal(signed_threshold(recorded_threshold(bounds, rule), rule, np.dtype(np.float32)), bounds)
