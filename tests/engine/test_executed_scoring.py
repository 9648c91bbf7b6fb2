"""Laws of executed scoring, in float64: decisions exactly, losses to 1e-10."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from runtime_models import (
    LATENT,
    LOGIT,
    STEPS,
    Reading,
    RowCounter,
    TwoLoops,
    assert_same,
    by_reference,
    middling,
    texts,
    tiny_huginn,
)

from halting_bench.benchmarks.base import NOT_SCORED, Sequence
from halting_bench.engine.score import Executed, execute
from halting_bench.engine.scripted import ScriptedExits
from halting_bench.engine.trace import TracePlan, trace
from halting_bench.errors import UserError
from halting_bench.halting.policies import AllOf, AnyOf, FixedDepth, ThresholdPolicy
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.halting.signals import SIGNALS
from halting_bench.records import Outcome

torch.set_num_threads(1)
KV_MODES = ("latest", "propagate", "last-only", "modulo-2", "modulo-6", "absent")


def same(left: Executed, right: Executed) -> None:
    for name in ("sequence", "position", "exit_step", "exit_per_loop", "outcome", "never_fired", "correct"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
    np.testing.assert_allclose(left.loss, right.loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kv_mode", KV_MODES)
@pytest.mark.parametrize("signal", ["latent-diff", "acceleration", "kl"])
def test_the_packed_runtime_equals_the_masked_reference(kv_mode: str, signal: str) -> None:
    model = tiny_huginn()
    policy = middling(model, signal)
    executed = execute(model, texts(), policy, max_steps=STEPS, kv_mode=kv_mode)
    assert len(set(executed.exit_step)) > 2  # rows do stop at different depths
    assert_same(executed, by_reference(model, texts(), policy, kv_mode=kv_mode))


@pytest.mark.parametrize("kv_mode", ["latest", "propagate", "absent", "modulo-2"])
@pytest.mark.parametrize("prefill", ["full", "shared"])
@pytest.mark.parametrize("signal", ["latent-diff", "kl"])
def test_a_prompt_run_at_one_depth_equals_the_masked_reference(kv_mode: str, prefill: str, signal: str) -> None:
    model = tiny_huginn()
    policy = middling(model, signal)
    sequences = texts(prompt=3)
    executed = execute(model, sequences, policy, max_steps=STEPS, kv_mode=kv_mode, prefill=prefill)
    assert_same(executed, by_reference(model, sequences, policy, kv_mode=kv_mode, prefill=prefill))


@pytest.mark.parametrize("signal", sorted(name for name, rule in SIGNALS.items() if not rule.needs_gate))
def test_every_signal_executes_as_the_masked_reference_does(signal: str) -> None:
    model = tiny_huginn(seed=1)
    policy = middling(model, signal)
    assert_same(execute(model, texts(2), policy, max_steps=STEPS), by_reference(model, texts(2), policy))


@pytest.mark.parametrize("kv_mode", ["latest", "last-only"])
@pytest.mark.parametrize("prefill", ["adaptive", "full", "shared"])
@pytest.mark.parametrize("signal", ["latent-diff", "kl"])
def test_points_that_share_a_batch_equal_each_run_alone(kv_mode: str, prefill: str, signal: str) -> None:
    model = tiny_huginn()
    policy, sequences, how = (
        middling(model, signal),
        texts(3, prompt=3),
        {"max_steps": STEPS, "kv_mode": kv_mode, "prefill": prefill},
    )
    thresholds = [policy.threshold * factor for factor in (0.5, 1.0, 2.0)]
    together = execute(model, sequences * 3, policy, thresholds=np.repeat(thresholds, 3), batch_rows=20, **how)
    assert len(set(together.exit_step)) > 2
    alone = [execute(model, sequences, replace(policy, threshold=threshold), **how) for threshold in thresholds]
    same(together, Executed(**{name: joined(alone, name) for name in vars(together)}))
    assert together.core_steps == sum(each.core_steps for each in alone)


def joined(parts: list[Executed], name: str) -> np.ndarray:
    values = [getattr(part, name) for part in parts]
    return np.concatenate(values) if isinstance(values[0], np.ndarray) else values


@pytest.mark.parametrize("join", [AnyOf, AllOf])
def test_combined_rules_execute_as_the_masked_reference_does(join: type[AnyOf] | type[AllOf]) -> None:
    model = tiny_huginn()
    policy = join((middling(model, "latent-diff", hits=2), middling(model, "entropy")))
    assert_same(execute(model, texts(2), policy, max_steps=STEPS), by_reference(model, texts(2), policy))


@pytest.mark.parametrize("kv_mode", ["latest", "propagate", "absent"])
@pytest.mark.parametrize("signal", LATENT)
def test_rounds_equal_forced_token_by_token_decoding(kv_mode: str, signal: str) -> None:
    model = tiny_huginn()
    rule = middling(model, signal)
    forced = Reading(rule.signal, rule.threshold)
    same(
        execute(model, texts(), rule, max_steps=STEPS, kv_mode=kv_mode),
        execute(model, texts(), forced, max_steps=STEPS, kv_mode=kv_mode),
    )


@pytest.mark.parametrize("signal", LATENT + LOGIT)
def test_kv_mode_full_equals_the_replayed_point(signal: str) -> None:
    model = tiny_huginn()
    policy = middling(model, signal)
    shard = trace(model, texts(), TracePlan((signal,), STEPS, seed=0))
    rule, scores = SIGNALS[signal], shard[f"score/{signal}"]
    crossed = scores < policy.threshold if rule.fires == "below" else scores >= policy.threshold
    exits = np.where(crossed.any(axis=1), crossed.argmax(axis=1) + 1, STEPS)
    wanted = by_reference(model, texts(), policy, kv_mode="full")
    np.testing.assert_array_equal(wanted["exit_step"], exits)
    np.testing.assert_allclose(wanted["loss"], shard["loss"][np.arange(len(exits)), exits - 1], rtol=0, atol=1e-10)


def test_rerun_differs_from_latest_only_through_what_frozen_tokens_show() -> None:
    model = tiny_huginn()
    scripted = ScriptedExits(1, 3)  # the same exits whatever is attended to
    rerun, latest = (by_reference(model, texts(1), scripted, kv_mode=mode) for mode in ("rerun", "latest"))
    np.testing.assert_array_equal(rerun["exit_step"], latest["exit_step"])
    assert rerun["loss"][0] == pytest.approx(latest["loss"][0], abs=1e-12)  # nothing precedes the first token
    assert np.abs(rerun["loss"] - latest["loss"]).max() > 1e-6


@pytest.mark.parametrize("needs_logits", [False, True])
@pytest.mark.parametrize("depth", [1, 3, STEPS])
def test_a_fixed_depth_equals_the_plain_forward_with_or_without_a_cache(needs_logits: bool, depth: int) -> None:
    model = tiny_huginn()
    sequences = texts()
    shard = trace(model, sequences, TracePlan((), STEPS, seed=0))
    always = Reading("latent-diff", np.inf, min_steps=depth) if needs_logits else FixedDepth(depth)
    executed = execute(model, sequences, always, max_steps=STEPS)
    assert set(executed.exit_step) == {depth}
    np.testing.assert_allclose(executed.loss, shard["loss"][:, depth - 1], rtol=0, atol=1e-10)
    assert set(executed.outcome) == {Outcome.EXHAUSTED if depth == STEPS else Outcome.HALTED}
    assert not executed.never_fired.any()


@pytest.mark.parametrize("signal", ["latent-diff", "kl"])
def test_a_rule_that_never_fires_exhausts_every_row(signal: str) -> None:
    executed = execute(tiny_huginn(), texts(), ThresholdPolicy(signal, -1.0), max_steps=STEPS)
    assert set(executed.outcome) == {Outcome.EXHAUSTED}
    assert executed.never_fired.all()
    assert executed.core_steps == STEPS * len(executed.exit_step)


@pytest.mark.parametrize("signal", ["latent-diff", "kl"])
def test_batches_order_and_padding_change_no_row(signal: str) -> None:
    model = tiny_huginn()
    policy = middling(model, signal)
    together = execute(model, texts(6), policy, max_steps=STEPS)
    alone = execute(model, texts(6), policy, max_steps=STEPS, batch_rows=1)
    same(together, alone)
    backwards = execute(model, texts(6)[::-1], policy, max_steps=STEPS, batch_rows=20)
    order = np.lexsort((backwards.position, backwards.sequence))
    np.testing.assert_array_equal(backwards.exit_step[order], together.exit_step)
    np.testing.assert_allclose(backwards.loss[order], together.loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize("signal", ["latent-diff", "kl"])
def test_in_float32_batches_change_no_decision_that_is_not_at_the_threshold(signal: str) -> None:
    model = tiny_huginn(dtype=torch.float32)
    scores = np.unique(trace(model, texts(6), TracePlan((signal,), STEPS, seed=0))[f"score/{signal}"])
    scores = scores[np.isfinite(scores)][len(scores) // 4 : len(scores) // 2]
    widest = int(np.argmax(scores[1:] / scores[:-1]))  # the middle of a gap: no score comes within 1e-5 of it
    policy = ThresholdPolicy(signal, float(np.sqrt(scores[widest] * scores[widest + 1])))
    together, alone = (execute(model, texts(6), policy, max_steps=STEPS, batch_rows=rows) for rows in (4096, 1))
    np.testing.assert_array_equal(together.exit_step, alone.exit_step)
    np.testing.assert_allclose(together.loss, alone.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("signal", ["latent-diff", "kl"])
@pytest.mark.parametrize("prefill", ["adaptive", "shared"])
def test_the_record_counts_what_a_counting_model_saw(signal: str, prefill: str) -> None:
    model = tiny_huginn()
    policy = middling(model, signal)
    counter = RowCounter(model)
    executed = execute(model, texts(prompt=2), policy, max_steps=STEPS, prefill=prefill)
    assert counter.rows == {"embed": executed.embeds, "step": executed.core_steps, "readout": executed.readouts}
    assert executed.evaluations == executed.core_steps
    if prefill == "adaptive" and signal == "latent-diff":
        assert executed.core_steps >= executed.exit_step.sum()
        assert executed.readouts == executed.embeds  # one a position, of its exit


def test_core_steps_are_the_sum_of_the_exits_when_every_position_is_scored() -> None:
    model = tiny_huginn()
    for signal in ("latent-diff", "kl"):
        executed = execute(model, texts(), middling(model, signal), max_steps=STEPS)
        assert executed.core_steps == executed.exit_step.sum()


def test_a_policy_object_is_unchanged_by_a_run() -> None:
    model = tiny_huginn()
    policy: HaltingPolicy = middling(model, "kl")
    before = dict(vars(policy))
    first, second = (execute(model, texts(), policy, max_steps=STEPS) for _ in range(2))
    assert vars(policy) == before
    same(first, second)


def test_two_loops_are_counted_apart_and_equal_the_masked_reference() -> None:
    model = TwoLoops()
    policy = ThresholdPolicy("latent-diff", 0.5)
    executed = execute(model, texts(), policy, max_steps=STEPS)
    np.testing.assert_array_equal(executed.exit_per_loop.sum(axis=1), executed.exit_step)
    assert len({tuple(row) for row in executed.exit_per_loop}) > 2
    assert_same(executed, by_reference(model, texts(), policy))
    same(executed, execute(model, texts(), Reading("latent-diff", 0.5), max_steps=STEPS))


def broken_text(model: torch.nn.Module) -> list[Sequence]:
    """Three sequences; the second holds, at its third position, a token whose embedding is not a number."""
    sequences = texts(3)
    for sequence in sequences:
        sequence.tokens[sequence.tokens == 5] = 6
    sequences[1].tokens[2] = 5
    model.transformer["wte"].weight[5] = torch.nan
    return sequences


@pytest.mark.parametrize("signal", ["latent-diff", "kl"])
@pytest.mark.parametrize("kv_mode", ["latest", "absent", "last-only"])
def test_a_row_whose_state_breaks_leaves_alone(signal: str, kv_mode: str) -> None:
    model = tiny_huginn()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)  # only inputs break
    policy = middling(model, signal)
    sequences = broken_text(model)
    executed = execute(model, sequences, policy, max_steps=STEPS, kv_mode=kv_mode)
    lost = (executed.sequence == sequences[1].uid) & (executed.position == 2)
    np.testing.assert_array_equal(executed.outcome == Outcome.NONFINITE, lost)
    np.testing.assert_array_equal(np.isnan(executed.loss), lost)
    assert not executed.correct[lost].any()
    assert_same(executed, by_reference(model, sequences, policy, kv_mode=kv_mode))
    neighbours = execute(model, [sequences[0], sequences[2]], policy, max_steps=STEPS, kv_mode=kv_mode)
    whole = executed.sequence != sequences[1].uid
    np.testing.assert_array_equal(executed.exit_step[whole], neighbours.exit_step)
    np.testing.assert_allclose(executed.loss[whole], neighbours.loss, rtol=0, atol=1e-10)


def test_out_of_memory_halves_the_rows_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_huginn()
    policy = middling(model, "latent-diff")
    wanted = execute(model, texts(6), policy, max_steps=STEPS)
    embed = model.embed

    def small_machine(tokens: torch.Tensor, context: object) -> torch.Tensor:
        if len(tokens) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return embed(tokens, context)  # type: ignore[arg-type]

    model.embed = small_machine  # type: ignore[method-assign,assignment]
    same(execute(model, texts(6), policy, max_steps=STEPS), wanted)
    assert "out of memory with" in caplog.text
    assert "going on with" in caplog.text


def test_one_sequence_that_does_not_fit_in_memory_is_an_error() -> None:
    model = tiny_huginn()

    def tiny_machine(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.embed = tiny_machine  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        execute(model, texts(1), FixedDepth(2), max_steps=STEPS)


def test_stages_are_timed_only_when_asked() -> None:
    model = tiny_huginn()
    ticks = iter(range(10**6))
    assert execute(model, texts(), FixedDepth(2), max_steps=STEPS).seconds is None
    seconds = execute(model, texts(), FixedDepth(2), max_steps=STEPS, clock=lambda: float(next(ticks))).seconds
    assert seconds is not None
    assert set(seconds) == {"embed", "core", "readout", "signal", "bookkeeping"}
    assert sum(seconds.values()) == next(ticks) - 1


def test_no_sequences_give_no_rows() -> None:
    executed = execute(tiny_huginn(), [], FixedDepth(2), max_steps=STEPS)
    assert executed.exit_per_loop.shape == (0, 1)
    assert executed.core_steps == 0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"kv_mode": "full"}, "kv_mode 'full' saves no work"),
        ({"kv_mode": "lastest"}, "did you mean 'latest'"),
        ({"kv_mode": "modulo-0"}, "unknown kv_mode 'modulo-0'"),
        ({"prefill": "share"}, "did you mean 'shared'"),
    ],
)
def test_a_wrong_name_is_the_users_to_mend(how: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        execute(tiny_huginn(), texts(1), FixedDepth(2), max_steps=STEPS, **how)  # type: ignore[arg-type]


def test_an_empty_or_overlong_sequence_is_the_users_to_mend() -> None:
    empty, long = np.zeros(0, np.int64), np.zeros(65, np.int64)
    with pytest.raises(UserError, match="empty"):
        execute(tiny_huginn(), [Sequence(0, 0, empty, empty)], FixedDepth(2), max_steps=STEPS)
    with pytest.raises(UserError, match="64 positions"):
        execute(tiny_huginn(), [Sequence(0, 0, long, np.full(65, NOT_SCORED))], FixedDepth(2), max_steps=STEPS)
