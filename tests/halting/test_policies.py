"""Laws of every policy: the object is never changed, rows are independent, and the gates mean what they say."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from views import Trajectory, random_router, run, run_compacted, settling

from halting_bench import catalog
from halting_bench.halting.policies import AllOf, AnyOf, FixedDepth, ThresholdPolicy
from halting_bench.halting.policy import HaltingPolicy, View, take_rows
from halting_bench.halting.routers import RouterPolicy
from halting_bench.halting.signals import SIGNALS
from halting_bench.plan import build_policy

SEEN = settling(rows=8, steps=9)
RECIPES = catalog.policy_names()


def middling(name: str) -> HaltingPolicy:
    """A recipe at a threshold at which some rows of SEEN halt early, some late."""
    recipe = catalog.find_policy(name)
    signal = recipe.signal or next(r.signal for r in (*recipe.any_of, *recipe.all_of) if r.threshold is None)
    scores = run(ThresholdPolicy(signal, 0.0), SEEN)[1]
    return build_policy(recipe, float(np.nanquantile(scores, 0.4 if SIGNALS[signal].fires == "below" else 0.6)))


POLICIES = {name: middling(name) for name in RECIPES} | {
    "fixed": FixedDepth(4),
    "gated": ThresholdPolicy("latent-diff", 0.4, hits=2, min_steps=4, every=2),
    "any": AnyOf((ThresholdPolicy("entropy", 0.8, hits=2), ThresholdPolicy("gate-cdf", 0.9), FixedDepth(8))),
    "router": RouterPolicy(random_router("linear"), 0.35),
    "gate router": RouterPolicy(random_router("gate"), 0.6),
    "gate router that sees change": RouterPolicy(random_router("gate", inputs="latent+change"), 0.75),
    "all": AllOf((ThresholdPolicy("latent-diff", 0.6), ThresholdPolicy("kl", 0.2, every=2))),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_leaves_the_policy_object_unchanged(name):
    policy = POLICIES[name]
    before, fields = pickle.dumps(policy), repr(dataclasses.asdict(policy))
    first, again = run(policy, SEEN), run(policy, SEEN)
    assert pickle.dumps(policy) == before
    assert repr(dataclasses.asdict(policy)) == fields
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", POLICIES)
def test_stepping_two_groups_of_rows_apart_equals_stepping_them_together(name):
    halts, scores = run(POLICIES[name], SEEN)
    for rows in (torch.tensor([0, 3, 5]), torch.tensor([1, 2, 4, 6, 7])):
        own_halts, own_scores = run(POLICIES[name], SEEN, rows)
        np.testing.assert_array_equal(own_halts, halts[:, rows])
        np.testing.assert_array_equal(own_scores, scores[:, rows])


@pytest.mark.parametrize("name", POLICIES)
def test_dropping_rows_that_halt_changes_nothing_for_the_rest(name):
    halts, scores = run(POLICIES[name], SEEN)
    fired = halts.any(axis=0)
    exits, at_exit = run_compacted(POLICIES[name], SEEN)
    np.testing.assert_array_equal(exits, np.where(fired, halts.argmax(axis=0) + 1, SEEN.steps + 1))
    np.testing.assert_array_equal(at_exit[fired], scores[exits[fired] - 1, np.flatnonzero(fired)])


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "fixed"])
def test_these_thresholds_make_rows_halt_at_different_steps(name):
    """Or the laws above would hold of nothing."""
    assert len(np.unique(run_compacted(POLICIES[name], SEEN)[0])) > 1


@pytest.mark.parametrize("name", POLICIES)
def test_every_entry_of_a_state_is_row_first_and_keeps_its_dtype(name):
    rows = torch.arange(SEEN.rows)
    start = state = POLICIES[name].init(SEEN.view(0, rows))
    for k in range(1, 4):
        state = POLICIES[name].step(SEEN.view(k, rows), state)[1]
        assert {key: (len(v), v.dtype) for key, v in state.items()} == {key: (SEEN.rows, v.dtype) for key, v in start.items()}


@pytest.mark.parametrize("name", POLICIES)
def test_a_step_leaves_the_state_and_the_view_that_it_was_given_as_they_were(name):
    rows = torch.arange(SEEN.rows)
    views = [SEEN.view(k, rows) for k in range(3)]
    seen = [(v.latent.clone(), SEEN.logits[k].clone()) for k, v in enumerate(views)]
    state = POLICIES[name].step(views[1], POLICIES[name].init(views[0]))[1]
    kept = {key: value.clone() for key, value in state.items()}
    POLICIES[name].step(views[2], state)
    for key, value in kept.items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=0, equal_nan=True)
    for k, (latent, logits) in enumerate(seen):
        assert torch.equal(views[k].latent, latent)
        assert torch.equal(SEEN.logits[k], logits)


@pytest.mark.parametrize("name", POLICIES)
def test_a_verdict_is_a_bool_and_a_score_per_row(name):
    rows = torch.arange(SEEN.rows)
    verdict, _ = POLICIES[name].step(SEEN.view(1, rows), POLICIES[name].init(SEEN.view(0, rows)))
    assert (verdict.halt.dtype, verdict.halt.shape) == (torch.bool, (SEEN.rows,))
    assert (verdict.score.dtype, verdict.score.shape) == (torch.float64, (SEEN.rows,))


def join(parts: list[torch.Tensor]) -> torch.Tensor:
    """Rows of several states. What is not defined at s_0 may be one NaN wide there."""
    wide = max(parts, key=torch.numel)
    return torch.cat([part.expand_as(wide) for part in parts])


@pytest.mark.parametrize("name", POLICIES)
def test_rows_may_be_at_different_steps(name):
    """Slots of a decoder are; the verdicts are those of each row at its own step."""
    policy, lag = POLICIES[name], torch.tensor([0, 2, 1, 0, 3, 1, 0, 2])
    rows = torch.arange(SEEN.rows)
    halts, _ = run(policy, SEEN)
    states = [policy.init(SEEN.view(0, row[None])) for row in rows]
    for time in range(1, SEEN.steps + 1):
        step = time - lag
        active = rows[step >= 1]
        view = View(step[active], SEEN.latent[step[active], active], lambda s=step, a=active: SEEN.logits[s[a], a],
                    lambda s=step, a=active: SEEN.gate[s[a], a])  # fmt: skip
        joined = {key: join([states[row][key] for row in active]) for key in states[0]}
        verdict, after = policy.step(view, joined)
        for place, row in enumerate(active):
            states[row] = take_rows(after, torch.tensor([place]))
        np.testing.assert_array_equal(verdict.halt.numpy(), halts[step[active] - 1, active])


def lengths(scores: np.ndarray) -> Trajectory:
    """Rows of width 1 whose step lengths are the given numbers, [K, R]."""
    path = np.concatenate((np.zeros((1, scores.shape[1])), np.cumsum(scores, axis=0)))[..., None]
    return Trajectory(*(torch.from_numpy(a) for a in (path, np.zeros((*path.shape[:2], 3)), np.zeros(path.shape[:2]))))


def by_hand(scores: list[float], threshold: float, hits: int, min_steps: int, every: int) -> int:
    """The rule as policies are described: consecutive checks on the right side, then the gate on the step."""
    run_of_hits = 0
    for k, score in enumerate(scores, start=1):
        if k % every:
            continue
        run_of_hits = run_of_hits + 1 if score < threshold else 0
        if run_of_hits >= hits and k >= min_steps:
            return k
    return len(scores) + 1


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, np.nan]), min_size=1, max_size=12),
    st.sampled_from([0.5, 1.0, 1.5, 2.5]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_hits_min_steps_and_every_mean_what_they_say(scores, threshold, hits, min_steps, every):
    seen = lengths(np.array(scores)[:, None])
    told = run(ThresholdPolicy("step-norm", threshold, hits, min_steps, every), seen)
    halts, found = told[0][:, 0], told[1][:, 0].tolist()  # after a NaN latent the next difference is NaN too
    assert (int(halts.argmax()) + 1 if halts.any() else len(scores) + 1) == by_hand(found, threshold, hits, min_steps, every)


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_nan_score_never_halts_and_breaks_a_run_of_hits(signal):
    broken = Trajectory(*(torch.full_like(a, torch.nan) for a in (SEEN.latent, SEEN.logits, SEEN.gate)))
    loosest = torch.inf if SIGNALS[signal].fires == "below" else -torch.inf
    halts, scores = run(ThresholdPolicy(signal, loosest), broken)
    assert not halts[np.isnan(scores)].any()
    if signal != "argmax-stable":  # the argmax of NaNs is an index like any other; the state counts as broken elsewhere
        assert np.isnan(scores).all()


def test_a_state_that_breaks_for_one_step_starts_the_count_of_hits_again():
    seen = lengths(np.ones((6, 1)))
    seen.latent[2] = torch.nan  # steps 2 and 3 have no score
    halts, scores = run(ThresholdPolicy("step-norm", 2.0, hits=2), seen)
    assert np.isnan(scores[:, 0]).tolist() == [False, True, True, False, False, False]
    assert halts[:, 0].tolist() == [False, False, False, False, True, True]


@pytest.mark.parametrize("signal", SIGNALS)
def test_equality_halts_only_closed_rules(signal):
    rule, scores = SIGNALS[signal], run(ThresholdPolicy(signal, 0.0), SEEN)[1]
    k = int(np.flatnonzero(np.isfinite(scores[:, 0]))[0])
    halts, _ = run(ThresholdPolicy(signal, float(scores[k, 0])), SEEN)
    assert bool(halts[k, 0]) is rule.closed


@pytest.mark.parametrize("name", RECIPES)
def test_a_stricter_threshold_never_halts_earlier(name):
    recipe = catalog.find_policy(name)
    signal = recipe.signal or next(r.signal for r in (*recipe.any_of, *recipe.all_of) if r.threshold is None)
    scores = run(ThresholdPolicy(signal, 0.0), SEEN)[1]
    grid = np.unique(scores[np.isfinite(scores)])[:: 3 if SIGNALS[signal].fires == "below" else -3]  # strictest first
    exits = np.stack([run_compacted(build_policy(recipe, float(t)), SEEN)[0] for t in grid])
    assert (np.diff(exits, axis=0) <= 0).all()
    assert (exits[0] > exits[-1]).any()


def test_any_of_halts_first_and_all_of_halts_together():
    slow, quick = FixedDepth(6), ThresholdPolicy("latent-diff", 0.5)
    parts = np.stack([run(rule, SEEN)[0] for rule in (slow, quick)])
    np.testing.assert_array_equal(run(AnyOf((slow, quick)), SEEN)[0], parts.any(axis=0))
    np.testing.assert_array_equal(run(AllOf((slow, quick)), SEEN)[0], parts.all(axis=0))


def test_a_combination_reads_logits_if_one_of_its_rules_does():
    latent, logit = ThresholdPolicy("cosine", 0.1), ThresholdPolicy("kl", 0.1)
    assert not AnyOf((latent, latent)).needs_logits
    assert AllOf((latent, logit)).needs_logits


@pytest.mark.parametrize(("signal", "pooled"), [("latent-diff", "mean"), ("entropy", "last")])
def test_a_prompt_that_stops_as_one_has_one_score(signal, pooled):
    rows, policy = torch.arange(SEEN.rows), ThresholdPolicy(signal, 0.5)
    state = policy.init(SEEN.view(0, rows))
    alone, _ = policy.step(SEEN.view(1, rows), state)
    view = SEEN.view(1, rows)
    view.shared = True
    verdict, _ = policy.step(view, state)
    wanted = alone.score.mean() if pooled == "mean" else alone.score[-1]
    torch.testing.assert_close(verdict.score, wanted.expand(SEEN.rows))
    assert len(verdict.halt.unique()) == 1


def test_a_model_without_a_gate_says_so():
    view = View(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2), lambda: torch.zeros(1, 3))
    with pytest.raises(LookupError, match="no halting gate"):
        view.gate()
