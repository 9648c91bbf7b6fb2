"""An encoder's sequence that stops as a whole, by the Frobenius norm of its step."""

import numpy as np
import pytest
import torch
from runtime_models import STEPS, texts, tiny_huginn
from test_multi_loop import encoder

from halting_bench.architectures.attention import DenseContext
from halting_bench.catalog import find_policy
from halting_bench.engine.multi_loop import GivenDepth, execute_stacked, loop_scores
from halting_bench.engine.score import execute
from halting_bench.engine.trace import TracePlan, trace
from halting_bench.halting.policies import ThresholdPolicy
from halting_bench.plan import plan_policy

torch.set_num_threads(1)
RULE = "attention-fixed-point"


def norms(layers: int = 1) -> list[np.ndarray]:
    """The rule's scores of each sequence written out, [R] each, first layer."""
    model, found = encoder(layers), []
    for text in texts():
        context = DenseContext(len(text.tokens), causal=False)
        x = model.embed(torch.from_numpy(text.tokens)[None], context)
        state, own = model.begin(0, x, None), []
        for _ in range(STEPS):
            before, state = state, model.step(0, state, x, context)
            own.append(float(torch.linalg.matrix_norm((state - before)[0]) / torch.linalg.matrix_norm(before[0])))
        found.append(np.array(own))
    return found


@pytest.mark.parametrize("batch_rows", [8192, 1])
def test_its_score_is_the_relative_frobenius_step_of_all_positions(batch_rows: int) -> None:
    scores = loop_scores(encoder(1), texts(prompt=2), (RULE,), max_steps=STEPS, batch_rows=batch_rows)[RULE]
    wanted = np.concatenate([np.tile(own, (len(s.tokens), 1)) for own, s in zip(norms(), texts(), strict=True)])
    np.testing.assert_allclose(scores[:, 0], wanted, rtol=1e-9)


def test_a_sequence_stops_at_its_own_step_and_as_one() -> None:
    model, scores = encoder(1), norms()
    tau = float(np.median(np.concatenate(scores)))
    done = execute(model, texts(), ThresholdPolicy(RULE, tau), max_steps=STEPS)
    wanted = [int((own < tau).argmax()) + 1 if (own < tau).any() else STEPS for own in scores]
    assert len(set(wanted)) > 1
    np.testing.assert_array_equal(done.exit_step, np.repeat(wanted, [len(s.tokens) for s in texts()]))
    given = np.repeat(wanted, [len(s.tokens) for s in texts()]).astype(float)[None, :, None]
    uniform = execute_stacked(model, texts(), GivenDepth(), given, max_steps=STEPS)
    np.testing.assert_allclose(done.loss, uniform.loss[0], rtol=0, atol=1e-12)


def test_points_and_sequences_side_by_side_do_not_mix() -> None:
    model = encoder(2)
    scores = loop_scores(model, texts(), (RULE,), max_steps=STEPS)[RULE]
    taus = np.quantile(scores, [0.3, 0.6])
    both = execute_stacked(model, texts(), ThresholdPolicy(RULE, np.nan), taus[:, None, None], max_steps=STEPS)
    assert len(np.unique(both.steps)) > 2
    for point, tau in enumerate(taus):
        parts = [execute(model, [text], ThresholdPolicy(RULE, float(tau)), max_steps=STEPS) for text in texts()]
        np.testing.assert_array_equal(both.steps[point], np.concatenate([part.exit_per_loop for part in parts]))
        np.testing.assert_allclose(both.loss[point], np.concatenate([part.loss for part in parts]), rtol=0, atol=1e-10)


def test_it_does_not_apply_to_a_model_that_decides_token_by_token() -> None:
    assert "for encoders" in plan_policy(find_policy(RULE), tiny_huginn().spec, STEPS).not_applicable
    assert plan_policy(find_policy(RULE), encoder().spec, STEPS).not_applicable == ""


def test_a_trace_of_scored_positions_refuses_it() -> None:
    with pytest.raises(ValueError, match="needs all of an encoder's sequence"):
        trace(encoder(1), texts(), TracePlan((RULE,), STEPS, 0))
