"""Points stacked on the batch give what each of them gives alone."""

import numpy as np
import pytest
import torch
from runtime_models import STEPS, RowCounter, TwoLoops, texts, tiny_huginn

from halting_bench.architectures.self_transformer import SelfTransformer
from halting_bench.engine.multi_loop import GivenDepth, execute_stacked, loop_scores, scored_positions
from halting_bench.engine.replay import Rule
from halting_bench.engine.score import execute
from halting_bench.engine.trace import TracePlan, trace
from halting_bench.errors import UserError
from halting_bench.executed_grid import never_fires
from halting_bench.halting.policies import ThresholdPolicy
from halting_bench.records import Outcome

torch.set_num_threads(1)


def encoder(layers: int = 2) -> SelfTransformer:
    torch.manual_seed(0)
    config = {
        "vocab_size": 13, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": layers, "intermediate_size": 24,
        "max_position_embeddings": 64, "mean_recurrence": 4, "damping": 0.5, "norm_eps": 1e-6, "rope_theta": 1000.0,
    }  # fmt: skip
    model = SelfTransformer(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.3)
    return model


MODELS = {"two loops": TwoLoops, "encoder": encoder, "one loop": tiny_huginn}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("signal", ["latent-diff", "acceleration"])
def test_stacked_points_equal_the_points_executed_alone(name: str, signal: str) -> None:
    model, sequences = MODELS[name](), texts(prompt=1)
    scores = loop_scores(model, sequences, (signal,), max_steps=STEPS)[signal]
    taus = np.nanquantile(scores, [0.2, 0.4, 0.7])
    stacked = execute_stacked(model, sequences, ThresholdPolicy(signal, np.nan), taus[:, None, None], max_steps=STEPS)
    assert len(np.unique(stacked.steps)) > 2
    for point, tau in enumerate(taus):
        alone = execute(model, sequences, ThresholdPolicy(signal, float(tau)), max_steps=STEPS)
        np.testing.assert_array_equal(stacked.steps[point], alone.exit_per_loop)
        np.testing.assert_allclose(stacked.loss[point], alone.loss, rtol=0, atol=1e-10)
        for what in ("correct", "outcome", "never_fired"):
            np.testing.assert_array_equal(getattr(stacked, what)[point], getattr(alone, what))


@pytest.mark.parametrize("name", MODELS)
def test_batches_and_points_together_change_nothing(name: str) -> None:
    model, sequences = MODELS[name](), texts(5)
    taus = np.array([0.05, 0.2, 0.6])[:, None, None]
    whole = execute_stacked(model, sequences, ThresholdPolicy("latent-diff", np.nan), taus, max_steps=STEPS)
    single = execute_stacked(model, sequences, ThresholdPolicy("latent-diff", np.nan), taus, max_steps=STEPS, batch_rows=1)
    np.testing.assert_array_equal(whole.steps, single.steps)
    np.testing.assert_allclose(whole.loss, single.loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_a_depth_a_loop_is_the_plain_forward(name: str) -> None:
    model, sequences = MODELS[name](), texts(3)
    loops = len(model.spec.loops)
    depths = np.array([[2.0, 5.0][:loops], [4.0, 1.0][:loops]])
    done = execute_stacked(model, sequences, GivenDepth(), depths[:, None, :], max_steps=STEPS)
    for point, depth in enumerate(depths.astype(int).tolist()):
        expected = []
        for sequence in sequences:
            noise = None
            if any(loop.random_start for loop in model.spec.loops):
                from halting_bench.architectures.noise import initial_noise

                noise = initial_noise(0, np.array([[sequence.uid]]), np.arange(len(sequence.tokens))[None], model.spec.width)
            logits = model(torch.from_numpy(sequence.tokens)[None], tuple(depth), noise)[0]
            gold = torch.from_numpy(sequence.targets)
            expected.append(torch.nn.functional.cross_entropy(logits, gold, reduction="none"))
        np.testing.assert_allclose(done.loss[point], torch.cat(expected).numpy(), rtol=0, atol=1e-10)
        assert (done.steps[point] == depth).all()


def test_every_loop_has_its_own_threshold_and_a_row_its_own() -> None:
    model, sequences = TwoLoops(), texts(2)
    positions = sum(len(s.tokens) for s in sequences)
    given = np.random.default_rng(0).integers(1, STEPS + 1, (1, positions, 2)).astype(float)
    done = execute_stacked(model, sequences, GivenDepth(), given, max_steps=STEPS)
    np.testing.assert_array_equal(done.steps[0], given[0, scored_positions(sequences)])


def test_the_prelude_runs_once_for_all_points() -> None:
    model, sequences = TwoLoops(), texts(3)
    counter = RowCounter(model)
    positions = sum(len(s.tokens) for s in sequences)
    done = execute_stacked(model, sequences, GivenDepth(), np.full((4, 1, 2), 2.0), max_steps=STEPS)
    assert counter.rows["embed"] == done.embeds == positions
    assert counter.rows["step"] == done.core_steps == 4 * positions * 2 * 2


def test_a_rule_that_never_fires_exhausts_every_row() -> None:
    done = execute_stacked(encoder(), texts(2), ThresholdPolicy("step-norm", np.nan), np.full((1, 1, 2), -1.0), max_steps=STEPS)
    assert (done.outcome == Outcome.EXHAUSTED).all()
    assert done.never_fired.all()
    assert (done.steps == STEPS).all()


def test_scores_of_one_loop_are_those_of_the_trace() -> None:
    model, sequences = tiny_huginn(), texts(3, prompt=2)
    signals = ("latent-diff", "acceleration", "kl")
    shard = trace(model, sequences, TracePlan(signals, STEPS, seed=0))
    scores = loop_scores(model, sequences, signals, max_steps=STEPS)
    for name in signals:
        scored = scores[name][scored_positions(sequences), 0]
        np.testing.assert_allclose(scored, shard[f"score/{name}"], rtol=1e-9, atol=1e-12)
    assert len(scores["kl"]) == sum(len(s.tokens) for s in sequences)


@pytest.mark.parametrize("name", MODELS)
def test_scores_do_not_depend_on_the_batch(name: str) -> None:
    model, sequences = MODELS[name](), texts(5)
    whole, single = (loop_scores(model, sequences, ("step-norm",), max_steps=STEPS, batch_rows=n) for n in (8192, 1))
    np.testing.assert_allclose(whole["step-norm"], single["step-norm"], rtol=1e-9)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("signal", "fires"), [("step-norm", "below"), ("margin", "above")])
def test_points_told_to_stop_nothing_stop_nothing(name: str, signal: str, fires: str) -> None:
    model, sequences = MODELS[name](), texts(4, prompt=1)
    rule, loops = Rule(signal, fires, hits=2, min_steps=3), len(model.spec.loops)
    scores = loop_scores(model, sequences, (signal,), max_steps=STEPS)[signal]
    low, high = np.nanmin(scores), np.nanmax(scores)
    taus = np.repeat(np.linspace(low - 0.1, high + 0.1, 6)[:, None], loops, axis=1)
    never = never_fires(scores, rule, taus)
    assert 0 < never.sum() < len(never)
    policy = ThresholdPolicy(signal, np.nan, hits=2, min_steps=3)
    done = execute_stacked(model, sequences, policy, taus[:, None], max_steps=STEPS)
    assert (done.steps[never] == STEPS).all()
    assert done.never_fired[never].all()
    deepest = execute_stacked(model, sequences, GivenDepth(), np.full((1, 1, loops), float(STEPS)), max_steps=STEPS)
    deepest = deepest.points(np.zeros(int(never.sum()), np.int64), never_fired=True)
    found = done.points(np.flatnonzero(never))
    np.testing.assert_allclose(found.loss, deepest.loss, rtol=0, atol=1e-10)
    for what in ("steps", "correct", "outcome", "never_fired"):
        np.testing.assert_array_equal(getattr(found, what), getattr(deepest, what))


@pytest.mark.parametrize("name", MODELS)
def test_a_logit_rule_that_stops_all_rows_together_is_exact(name: str) -> None:
    model, sequences = MODELS[name](), texts(3)
    loops = len(model.spec.loops)
    rule = ThresholdPolicy("entropy", np.nan, min_steps=3)
    done = execute_stacked(model, sequences, rule, np.full((1, 1, loops), np.inf), max_steps=STEPS)
    uniform = execute_stacked(model, sequences, GivenDepth(), np.full((1, 1, loops), 3.0), max_steps=STEPS)
    assert (done.steps == 3).all()
    np.testing.assert_allclose(done.loss, uniform.loss, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_logit_rules_stop_where_the_scores_of_their_first_exits_say(name: str) -> None:
    model, sequences = MODELS[name](), texts(3)
    scores = loop_scores(model, sequences, ("entropy",), max_steps=STEPS)["entropy"][:, 0]
    tau = float(np.quantile(scores, 0.3))
    thresholds = np.full((1, 1, len(model.spec.loops)), tau)
    done = execute_stacked(model, sequences, ThresholdPolicy("entropy", np.nan), thresholds, max_steps=STEPS)
    np.testing.assert_array_equal(done.steps[0, :, 0] == 1, scores[:, 0] < tau)  # nobody has stopped before the first round
    assert len(np.unique(done.steps)) > 2


def test_a_cache_that_overwrites_steps_is_refused() -> None:
    with pytest.raises(UserError, match="not exact in rounds"):
        execute_stacked(TwoLoops(), texts(1), GivenDepth(), np.ones((1, 1, 2)), max_steps=STEPS, kv_mode="last-only")
