"""Timed work: what is run, that it is the same work each time, and the bracket that comes of it."""

import numpy as np
import pytest
import torch

from halting_bench.architectures.huginn import Huginn
from halting_bench.benchmarks.base import Sequence
from halting_bench.errors import UserError
from halting_bench.halting.policies import FixedDepth, ThresholdPolicy
from halting_bench.halting.policy import HaltingPolicy, Verdict
from halting_bench.timing.clock import FakeClock
from halting_bench.timing.protocol import Protocol, measure
from halting_bench.timing.workloads import PROMPT, bracket_plan, decoding, fixed_length, prefill

torch.set_num_threads(1)

CONFIG = {
    "n_embd": 16, "n_heads": 2, "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 1, "n_layers_in_coda": 1,
    "intermediate_size": 32, "block_size": 64, "padded_vocab_size": 32, "mean_recurrence": 6, "norm_eps": 1e-6,
    "rope_base": 10_000.0,
}  # fmt: skip
STEPS = 8
PROTOCOL = Protocol(min_runs=6, min_time_s=0.0, warm_ups=1)


class TickingHuginn(Huginn):
    """Takes a second a row and core step on a fake clock, and nothing for the rest."""

    clock: FakeClock

    def step(self, loop, state, x, context):
        self.clock.advance(float(len(state)))
        return super().step(loop, state, x, context)


class Scattered(HaltingPolicy):
    """Stops at 2, 3, 4, ... by how the latent falls: an arbitrary but fixed function of the row."""

    needs_logits = False

    def init(self, view):
        return {}

    def step(self, view, state):
        depth = 2 + (view.latent[:, 0].abs() * 1000).long() % 5
        return Verdict(view.step >= depth, view.latent[:, 0]), state


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def model(clock) -> TickingHuginn:
    torch.manual_seed(0)
    model = TickingHuginn(CONFIG).eval()
    model.clock = clock
    return model


@pytest.fixture
def sequences() -> list[Sequence]:
    generator = np.random.default_rng(0)
    tokens = [generator.integers(0, 32, length) for length in (12, 5, 20)]
    return [Sequence(i, i, t, np.roll(t, -1)) for i, t in enumerate(tokens)]


def timed(plan, clock):
    return plan.read(measure(plan.points, PROTOCOL, clock, np.random.default_rng(0)))


def test_rows_have_one_length_and_initial_states_of_their_own(sequences):
    rows = fixed_length(sequences, 5, 10)
    assert [len(row.tokens) for row in rows] == [10] * 5
    assert [row.document for row in rows] == [0, 2, 0, 2, 0]
    assert len({row.uid for row in rows}) == 5


def test_a_length_that_no_sequence_has_is_refused(sequences):
    with pytest.raises(UserError, match="the longest has 20"):
        fixed_length(sequences, 2, 21)


def test_where_time_is_core_steps_prefill_realises_all_of_the_saving(model, clock, sequences):
    build = prefill(model, fixed_length(sequences, 3, 10), max_steps=STEPS)
    plan = bracket_plan(build, {"scattered": Scattered()}, max_steps=STEPS, trained=6)
    timings, brackets = timed(plan, clock)
    depth = plan.policies["scattered"].mean_depth
    assert 2 <= depth < STEPS and depth % 1 > 0
    assert timings["scattered"].tokens == 30
    assert timings["scattered"].seconds().value == pytest.approx(30 * depth)
    assert brackets["scattered"].realised_fraction.value == pytest.approx(1.0)
    assert brackets["scattered"].speedup.value == pytest.approx(6 / depth)
    assert brackets["scattered"].speedup_ideal.value == pytest.approx(6 / depth)


def test_decoding_leaves_prompts_and_the_tokens_that_they_make_out(model, clock, sequences):
    prompts = [row.tokens.tolist() for row in fixed_length(sequences, 3, 10)]
    build = decoding(model, prompts, max_new_tokens=5, max_steps=STEPS)
    plan = bracket_plan(build, {"scattered": Scattered()}, max_steps=STEPS, trained=6, prompts=True)
    timings, brackets = timed(plan, clock)
    assert PROMPT not in timings and timings["scattered"].tokens == 3 * 4
    assert timings["scattered"].prompt_s == 3 * 10 * 6
    assert timings["fixed@8"].seconds().value == pytest.approx(3 * 4 * 8)
    assert timings["scattered"].columns()["latency_ms_per_token"] == pytest.approx(1e3 * plan.policies["scattered"].mean_depth)
    assert brackets["scattered"].realised_fraction.value == pytest.approx(1.0)


def test_points_come_in_whole_brackets_without_doubles(model, sequences):
    build = prefill(model, fixed_length(sequences, 2, 10), max_steps=STEPS)
    policies = {"three": FixedDepth(3), "never": ThresholdPolicy("latent-diff", 0.0), "scattered": Scattered()}
    plan = bracket_plan(build, policies, max_steps=STEPS, trained=32)
    keys = [point.key for point in plan.points]
    assert 3 < plan.policies["scattered"].mean_depth < 4
    assert keys == ["fixed@8", "fixed@3", "three", "never", "fixed@4", "scattered"]


def test_a_policy_whose_decisions_change_is_not_timed(model, clock, sequences):
    class Fickle(Scattered):
        runs = 0

        def init(self, view):
            Fickle.runs += 1
            return {}

        def step(self, view, state):
            return Verdict(view.step >= 2 + Fickle.runs % 2, view.latent[:, 0]), state

    build = prefill(model, fixed_length(sequences, 2, 10), max_steps=STEPS)
    plan = bracket_plan(build, {"fickle": Fickle(), "scattered": Scattered()}, max_steps=STEPS, trained=6)
    timings, _ = timed(plan, clock)
    assert timings["fickle"].status == "failed" and "other exits" in timings["fickle"].error
    assert timings["scattered"].status == "ok"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_stages_tell_where_the_time_goes(model, clock, sequences, phase):
    rows = fixed_length(sequences, 2, 10)
    build = (
        prefill(model, rows, max_steps=STEPS)
        if phase == "prefill"
        else decoding(model, [row.tokens.tolist() for row in rows], max_new_tokens=3, max_steps=STEPS)
    )
    stages = build("scattered", Scattered()).stages(clock)
    assert stages["core"] > 0 and stages["readout"] == stages["signal"] == stages["bookkeeping"] == 0


def test_decoding_one_token_has_nothing_to_time(model):
    with pytest.raises(UserError, match="type 2 or more"):
        decoding(model, [[1, 2]], max_new_tokens=1, max_steps=STEPS)


class CrampedHuginn(Huginn):
    """Has memory for three rows of a core step."""

    def step(self, loop, state, x, context):
        if len(state) > 3:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried")
        return super().step(loop, state, x, context)


def test_rows_that_do_not_fit_are_not_timed_as_if_they_did() -> None:
    torch.manual_seed(0)
    cramped = CrampedHuginn(CONFIG).eval()
    build = decoding(cramped, [[1], [2], [3], [4], [5]], max_new_tokens=3, max_steps=4)
    with pytest.raises(MemoryError, match="5 rows do not fit into memory: type fewer, --batch-rows 2"):
        build("fixed@2", FixedDepth(2))
    with pytest.raises(MemoryError, match="rows do not fit into memory"):
        prefill(cramped, fixed_length([Sequence(0, 0, np.arange(2), np.arange(2))], 2, 2), max_steps=4)("f", FixedDepth(2))
