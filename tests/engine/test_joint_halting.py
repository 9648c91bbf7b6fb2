"""One decision for all loops: the rule acts in the first, and the others take as many steps."""

import numpy as np
import pytest
import torch
from runtime_models import STEPS, VOCAB, Reading, RowCounter, TwoLoops, assert_same, by_reference, texts
from test_multi_loop import encoder

from halting_bench.engine.decode import decode
from halting_bench.engine.multi_loop import GivenDepth, execute_stacked, loop_scores, scored_positions
from halting_bench.engine.score import execute
from halting_bench.halting.policies import AnyOf, FixedDepth, Jointly, ThresholdPolicy
from halting_bench.records import Outcome

torch.set_num_threads(1)
MODELS = {"two loops": TwoLoops, "encoder": encoder}
RULES = {
    "threshold": ThresholdPolicy("latent-diff", 0.5),
    "two hits": ThresholdPolicy("acceleration", 2.0, hits=2),
    "either": AnyOf((ThresholdPolicy("latent-diff", 0.4), FixedDepth(5))),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kv_mode", ["latest", "absent"])
def test_scoring_equals_the_masked_reference(name: str, kv_mode: str) -> None:
    model, policy = TwoLoops(), Jointly(RULES[name])
    executed = execute(model, texts(), policy, max_steps=STEPS, kv_mode=kv_mode)
    assert len(set(executed.exit_step)) > 1
    np.testing.assert_array_equal(executed.exit_per_loop[:, 0], executed.exit_per_loop[:, 1])
    assert_same(executed, by_reference(model, texts(), policy, kv_mode=kv_mode))


@pytest.mark.parametrize("prefill", ["full", "shared"])
def test_a_prompt_that_stops_as_one_decides_once(prefill: str) -> None:
    model, policy, sequences = TwoLoops(), Jointly(RULES["threshold"]), texts(prompt=3)
    executed = execute(model, sequences, policy, max_steps=STEPS, prefill=prefill)
    assert_same(executed, by_reference(model, sequences, policy, prefill=prefill))


def test_rounds_equal_token_by_token_decoding() -> None:
    model = TwoLoops()
    rounds = execute(model, texts(), Jointly(ThresholdPolicy("latent-diff", 0.5)), max_steps=STEPS)
    forced = execute(model, texts(), Jointly(Reading("latent-diff", 0.5)), max_steps=STEPS)
    np.testing.assert_array_equal(rounds.exit_per_loop, forced.exit_per_loop)
    np.testing.assert_allclose(rounds.loss, forced.loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", RULES)
def test_a_decoded_sequence_is_the_same_alone_and_in_any_batch(name: str) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in rng.integers(1, 7, 12)]
    how = {"max_new_tokens": 5, "max_steps": STEPS}
    together = decode(TwoLoops(), prompts, Jointly(RULES[name]), slots=5, **how)
    assert together == [
        decode(TwoLoops(), [p], Jointly(RULES[name]), slots=1, uids=[i], **how)[0] for i, p in enumerate(prompts)
    ]
    loops = np.concatenate([result.loop_steps for result in together])
    assert len(np.unique(loops)) > 1
    np.testing.assert_array_equal(loops[:, 0], loops[:, 1])


@pytest.mark.parametrize("name", MODELS)
def test_stacked_points_take_the_depths_that_the_first_loop_chose(name: str) -> None:
    model, sequences = MODELS[name](), texts(prompt=1)
    taus = np.nanquantile(loop_scores(model, sequences, ("latent-diff",), max_steps=STEPS)["latent-diff"][:, 0], [0.2, 0.5])
    rule = ThresholdPolicy("latent-diff", np.nan)
    joint = execute_stacked(model, sequences, Jointly(rule), taus[:, None, None], max_steps=STEPS)
    apart = execute_stacked(model, sequences, rule, taus[:, None, None], max_steps=STEPS)
    assert len(np.unique(joint.steps)) > 2
    np.testing.assert_array_equal(joint.steps, np.repeat(apart.steps[:, :, :1], 2, axis=2))
    for point, tau in enumerate(taus):
        alone = execute(model, sequences, Jointly(ThresholdPolicy("latent-diff", float(tau))), max_steps=STEPS)
        np.testing.assert_array_equal(joint.steps[point], alone.exit_per_loop)
        np.testing.assert_allclose(joint.loss[point], alone.loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_a_depth_that_is_decided_is_a_depth_that_is_given(name: str) -> None:
    model, sequences = MODELS[name](), texts(3)
    joint = execute_stacked(model, sequences, Jointly(RULES["threshold"]), np.full((1, 1, 2), 0.5), max_steps=STEPS)
    given = np.zeros((1, sum(len(s.tokens) for s in sequences), 2))
    given[0, scored_positions(sequences)] = joint.steps[0]
    same = execute_stacked(model, sequences, GivenDepth(), given, max_steps=STEPS)
    np.testing.assert_array_equal(same.steps, joint.steps)
    np.testing.assert_allclose(same.loss, joint.loss, rtol=0, atol=1e-10)


def test_a_rule_that_never_fires_exhausts_every_loop_and_says_so() -> None:
    policy = Jointly(ThresholdPolicy("latent-diff", -1.0))
    for model in (TwoLoops(), encoder()):
        done = execute(model, texts(2), policy, max_steps=STEPS)
        assert (done.exit_per_loop == STEPS).all() and done.never_fired.all()
        assert (done.outcome == Outcome.EXHAUSTED).all()
    (told,) = decode(TwoLoops(), [[1, 2]], policy, max_new_tokens=2, max_steps=STEPS, slots=1)
    assert not any(told.fired)


def test_a_rule_that_fires_at_the_cap_has_fired() -> None:
    done = execute(TwoLoops(), texts(2), Jointly(FixedDepth(STEPS)), max_steps=STEPS)
    assert (done.outcome == Outcome.EXHAUSTED).all() and not done.never_fired.any()


def test_steps_are_counted_in_every_loop_and_looks_in_the_first() -> None:
    model = TwoLoops()
    counter = RowCounter(model)
    done = execute(model, texts(), Jointly(RULES["threshold"]), max_steps=STEPS)
    assert counter.rows["step"] == done.core_steps == done.exit_step.sum()
    assert done.evaluations == done.exit_per_loop[:, 0].sum()
