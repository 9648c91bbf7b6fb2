"""Laws of decoding, in float64: a sequence's tokens and steps do not depend on what runs beside it."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from runtime_models import STEPS, VOCAB, RowCounter, TwoLoops, middling, tiny_huginn
from torch import Tensor

from halting_bench.architectures.base import RecurrentModel
from halting_bench.engine.contexts import SlotContext
from halting_bench.engine.decode import decode, stream
from halting_bench.engine.graphs import GraphedCore
from halting_bench.engine.kv_cache import READOUT, KvCache, KvMode, Workspace
from halting_bench.engine.masked_reference import MaskedReference
from halting_bench.engine.meter import Meter
from halting_bench.engine.requests import Decoded, Request
from halting_bench.engine.sampling import Sampling
from halting_bench.engine.scripted import ScriptedExits
from halting_bench.engine.slots import SlotEngine
from halting_bench.engine.tables import Plan
from halting_bench.errors import UserError
from halting_bench.halting.policies import AnyOf, FixedDepth, ThresholdPolicy
from halting_bench.halting.policy import HaltingPolicy, State, Verdict, View
from halting_bench.records import Outcome

torch.set_num_threads(1)
SAMPLED = Sampling(temperature=1.3, top_k=9, top_p=0.95, seed=3)


def prompts(count: int = 6, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, n).tolist() for n in generator.integers(1, 7, count)]


def run(model: RecurrentModel, texts: list[list[int]], policy: HaltingPolicy, **how: object) -> list[Decoded]:
    settings = {"max_new_tokens": 5, "max_steps": STEPS, "slots": 3} | how
    return decode(model, texts, policy, **settings)  # type: ignore[arg-type]


def by_reference(model: RecurrentModel, prompt: list[int], policy: HaltingPolicy, uid: int, kv_mode: str) -> Decoded:
    reference = MaskedReference(model, policy, max_steps=STEPS, kv_mode=kv_mode, uid=uid)
    rows = reference.feed(prompt)
    tokens: list[int] = []
    while len(tokens) < 5:
        assert rows[-1].logits is not None
        tokens.append(int(rows[-1].logits.argmax()))
        rows += reference.feed(tokens[-1:]) if len(tokens) < 5 else []
    steps, outcomes = [sum(row.steps) for row in rows], [row.outcome for row in rows]
    ask, loops = len(prompt), [list(row.steps) for row in rows]
    prompted = steps[:ask], outcomes[:ask]
    fired = [row.fired for row in rows][ask - 1 :]
    return Decoded(uid, tokens, steps[ask - 1 :], outcomes[ask - 1 :], *prompted, "length", loops[ask - 1 :], fired)


@pytest.mark.parametrize("kv_mode", ["latest", "propagate", "last-only", "modulo-2", "absent"])
@pytest.mark.parametrize("signal", ["latent-diff", "kl"])
def test_greedy_decoding_equals_the_masked_reference(kv_mode: str, signal: str) -> None:
    model = tiny_huginn()
    policy = middling(model, signal)
    results = run(model, prompts(3), policy, kv_mode=kv_mode)
    assert results == [by_reference(model, p, policy, i, kv_mode) for i, p in enumerate(prompts(3))]


def test_two_loops_decode_as_the_masked_reference_does() -> None:
    model, policy = TwoLoops(), ThresholdPolicy("latent-diff", 0.5)
    results = run(model, prompts(3), policy)
    assert results == [by_reference(model, p, policy, i, "latest") for i, p in enumerate(prompts(3))]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
@pytest.mark.parametrize("signal", ["latent-diff", "kl"])
def test_a_sequence_is_the_same_alone_in_any_batch_and_in_any_order(sampling: Sampling, signal: str) -> None:
    model = tiny_huginn()
    policy, texts, names = middling(model, signal), prompts(), list(range(6))
    together = run(model, texts, policy, sampling=sampling, slots=6)
    assert len({tuple(result.tokens) for result in together}) > 1
    for slots in (1, 4):
        assert run(model, texts, policy, sampling=sampling, slots=slots) == together
    backwards = run(model, texts[::-1], policy, sampling=sampling, uids=names[::-1])
    assert backwards[::-1] == together
    alone = [run(model, [texts[i]], policy, sampling=sampling, uids=[i])[0] for i in names]
    assert alone == together


class Glimpsing(HaltingPolicy):
    """A rule on states that looks at logits, for nothing, whenever some row is at an even step."""

    def __init__(self, rule: HaltingPolicy):
        self.rule = rule

    def init(self, view: View) -> State:
        return self.rule.init(view)

    def step(self, view: View, state: State) -> tuple[Verdict, State]:
        if bool((view.step % 2 == 0).any()):
            view.logits()
        return self.rule.step(view, state)


@pytest.mark.parametrize("model", [tiny_huginn, TwoLoops])
@pytest.mark.parametrize("rule", ["latent-diff", "kl", "glimpsing"])
def test_rows_that_wait_for_each_other_decode_what_they_would_alone(model: Callable[[], RecurrentModel], rule: str) -> None:
    if model is TwoLoops:
        if rule != "latent-diff":
            pytest.skip("logits exist in the last loop only")
        policy: HaltingPolicy = ThresholdPolicy(rule, 0.5)
    else:
        policy = Glimpsing(middling(model(), "latent-diff")) if rule == "glimpsing" else middling(model(), rule)
    texts = prompts(24)
    together = run(model(), texts, policy, slots=24)
    assert len({step for result in together for step in result.steps}) > 1
    assert together == [run(model(), [text], policy, slots=1, uids=[i])[0] for i, text in enumerate(texts)]


def test_rows_re_enter_several_at_a_time() -> None:
    model, calls = tiny_huginn(), 0
    embed = model.embed

    def counting(tokens: Tensor, context: SlotContext) -> Tensor:
        nonlocal calls
        calls += 1
        return embed(tokens, context)

    model.embed = counting  # type: ignore[method-assign,assignment]
    meter = Meter()
    run(model, prompts(24), ScriptedExits(1, STEPS), slots=24, max_new_tokens=20, prefill="full", meter=meter)
    assert meter.embeds >= 4 * calls


def test_sampling_seeds_change_tokens_and_a_seed_repeats_them() -> None:
    model = tiny_huginn()
    first, second = (run(model, prompts(), FixedDepth(2), sampling=Sampling(1.0, seed=seed)) for seed in (1, 2))
    assert first == run(model, prompts(), FixedDepth(2), sampling=Sampling(1.0, seed=1))
    assert [r.tokens for r in first] != [r.tokens for r in second]


def test_a_fixed_depth_decodes_what_the_plain_forward_would() -> None:
    model = tiny_huginn()
    model.spec = type(model.spec)(**{**vars(model.spec), "loops": ()})
    zeros = tiny_huginn()
    zeros.spec = type(zeros.spec)(**{**vars(zeros.spec), "loops": (zeros.spec.loops[0].__class__("core", 2, False),)})
    for depth in (1, 3, STEPS):
        [result] = run(zeros, [[1, 2, 3]], FixedDepth(depth))
        tokens = [1, 2, 3]
        for _ in range(5):
            tokens.append(int(zeros(torch.tensor([tokens]), depth)[0, -1].argmax()))
        assert result.tokens == tokens[3:]
        assert set(result.steps) == {depth}


def test_a_stop_token_ends_a_sequence_and_is_its_last() -> None:
    model = tiny_huginn()
    policy = middling(model, "latent-diff")
    free = run(model, prompts(), policy)
    stop = free[0].tokens[2]
    for whole, cut in zip(free, run(model, prompts(), policy, stop=[stop]), strict=True):
        end = whole.tokens.index(stop) + 1 if stop in whole.tokens else 5
        assert cut.tokens == whole.tokens[:end]
        assert cut.steps == whole.steps[:end]
        assert cut.stopped == ("stop" if stop in whole.tokens else "length")


def test_different_operating_points_share_a_batch() -> None:
    model = tiny_huginn()
    policy = middling(model, "latent-diff")
    own = [policy.threshold * factor for factor in (0.5, 1.0, 1.5, 0.8, 1.2, 1.0)]
    together = run(model, prompts(), policy, thresholds=own)
    for i, (prompt, threshold) in enumerate(zip(prompts(), own, strict=True)):
        assert run(model, [prompt], ThresholdPolicy("latent-diff", threshold), uids=[i]) == [together[i]]


def test_a_policy_without_a_threshold_refuses_one_per_sequence() -> None:
    with pytest.raises(UserError, match="FixedDepth has no threshold"):
        run(tiny_huginn(), prompts(1), FixedDepth(2), thresholds=[0.1])


@pytest.mark.parametrize("signal", ["latent-diff", "kl"])
@pytest.mark.parametrize("prefill", ["adaptive", "full", "shared"])
def test_the_meter_counts_what_a_counting_model_saw(signal: str, prefill: str) -> None:
    model = tiny_huginn()
    policy, meter = middling(model, signal), Meter()
    counter = RowCounter(model)
    results = run(model, prompts(), policy, prefill=prefill, meter=meter)
    assert counter.rows == {"embed": meter.embeds, "step": meter.core_steps, "readout": meter.readouts}
    assert meter.core_steps == sum(sum(r.prompt_steps) + sum(r.steps[1:]) for r in results)
    if signal == "latent-diff":
        assert meter.readouts == meter.embeds == sum(len(r.prompt_steps) + 4 for r in results)


def test_a_sequence_whose_state_breaks_ends_and_hurts_no_neighbour() -> None:
    model = tiny_huginn()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    policy = middling(model, "latent-diff")
    sound = run(model, prompts(), policy, slots=6)
    bad = sound[2].tokens[1]  # the second token that sequence 2 makes breaks whoever embeds it
    model.transformer["wte"].weight[bad] = torch.nan
    texts = [[t if t != bad else (bad + 1) % VOCAB for t in prompt] for prompt in prompts()]
    results = run(model, texts, policy, slots=6)
    assert any(r.stopped == "nonfinite" for r in results)
    for i, result in enumerate(results):
        assert run(model, [texts[i]], policy, uids=[i]) == [result]
        if result.stopped == "nonfinite":
            assert result.tokens[-1] == bad
            assert len(result.tokens) < 5
        else:
            assert bad not in result.tokens[:-1]


def test_a_prompt_that_breaks_loses_only_its_broken_token() -> None:
    model = tiny_huginn()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    model.transformer["wte"].weight[5] = torch.nan
    policy = middling(tiny_huginn(), "latent-diff")
    result, neighbour = run(model, [[1, 5, 2, 3], [4, 1]], policy)
    assert [o is Outcome.NONFINITE for o in result.prompt_outcomes] == [False, True, False, False]
    assert neighbour == run(model, [[4, 1]], policy, uids=[1])[0]
    [at_the_end] = run(model, [[1, 2, 5]], policy)
    assert (at_the_end.tokens, at_the_end.stopped) == ([], "nonfinite")
    [shared] = run(model, [[1, 5, 2]], policy, prefill="shared")
    assert (shared.tokens, shared.stopped) == ([], "nonfinite")


def test_a_shared_prompt_stops_when_all_of_its_positions_say_so() -> None:
    model, scripted = tiny_huginn(), ScriptedExits(1, STEPS)  # a rule that knows nothing of prompts
    own = run(model, prompts(), scripted)
    for result, shared in zip(own, run(model, prompts(), scripted, prefill="shared"), strict=True):
        assert set(shared.prompt_steps) == {max(result.prompt_steps)}


def requests(count: int, length: int = 3) -> Iterator[Request]:
    generator = np.random.default_rng(0)
    return (Request(uid, generator.integers(0, VOCAB, length), 4) for uid in range(count))


def streamed(model: RecurrentModel, queue: Iterator[Request], **how: object) -> Iterator[Decoded]:
    settings = {"max_prompt": 3, "max_new_tokens": 4, "max_steps": STEPS, "slots": 4} | how
    return stream(model, queue, middling(tiny_huginn(), "latent-diff"), **settings)  # type: ignore[arg-type]


def test_a_long_queue_is_answered_once_each_and_read_only_as_slots_come_free() -> None:
    taken = 0

    def queue() -> Iterator[Request]:
        nonlocal taken
        for request in requests(60):
            taken += 1
            yield request

    answered = []
    for result in streamed(tiny_huginn(), queue()):
        answered.append(result.uid)
        assert taken <= len(answered) + 2 * 4  # those in slots, and those that took the place of others that just ended
    assert sorted(answered) == list(range(60))


def test_the_cache_never_grows() -> None:
    model = tiny_huginn()
    plan = Plan(4, 8, STEPS, KvMode.parse("latest"), "adaptive", 0, Sampling(), frozenset())
    engine = SlotEngine(model, middling(model, "latent-diff"), plan, Meter())
    sizes = {engine.tables.cache.bytes for _ in engine.run(requests(20))}
    assert len(sizes) == 1


def test_runs_that_share_a_workspace_decode_the_same_tokens() -> None:
    model, workspace = tiny_huginn(), Workspace()
    policy = middling(model, "latent-diff")
    wanted = run(model, prompts(), policy)
    assert run(model, prompts()[::-1], policy, workspace=workspace, uids=[9, 8, 7, 6, 5, 4])
    memory = workspace.cache
    assert run(model, prompts(), policy, workspace=workspace) == wanted
    assert workspace.cache is memory
    assert run(model, prompts(), policy, workspace=workspace, slots=2) == wanted
    assert workspace.cache is not memory


def test_interrupting_keeps_what_is_finished() -> None:
    def queue() -> Iterator[Request]:
        yield from requests(9)
        raise KeyboardInterrupt

    kept: list[Decoded] = []
    with pytest.raises(KeyboardInterrupt):
        kept.extend(streamed(tiny_huginn(), queue()))
    everything = {r.uid: r for r in streamed(tiny_huginn(), requests(9))}
    assert kept
    assert all(result == everything[result.uid] for result in kept)


def test_out_of_memory_halves_the_slots_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_huginn()
    wanted = sorted(streamed(tiny_huginn(), requests(12), slots=8), key=lambda r: r.uid)
    step = model.step

    def small_machine(loop: int, state: Tensor, x: Tensor, context: SlotContext) -> Tensor:
        if len(state) > 3:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried")
        return step(loop, state, x, context)

    model.step = small_machine  # type: ignore[method-assign,assignment]
    queue = (Request(r.uid, r.tokens[:1], 4) for r in requests(12))
    short = sorted(streamed(model, queue, slots=8), key=lambda r: r.uid)
    assert "out of memory with 8 slots: going on with 4" in caplog.text
    assert "out of memory with 4 slots: going on with 2" in caplog.text
    again = (Request(r.uid, r.tokens[:1], 4) for r in requests(12))
    assert short == sorted(streamed(tiny_huginn(), again, slots=8), key=lambda r: r.uid)
    assert len(wanted) == len(short) == 12


def test_another_error_is_not_taken_for_a_lack_of_memory() -> None:
    model = tiny_huginn()

    def broken(*_: object) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    model.step = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(model, prompts(2), FixedDepth(2))


def test_a_trial_readout_leaves_no_trace_that_another_row_reads() -> None:
    model = tiny_huginn()
    like = next(model.parameters())
    cache = KvCache(model.spec, 2, 4, STEPS, KvMode.parse("latest"), like)
    generator = torch.Generator().manual_seed(0)
    for layer in (0, 1, 2, 3):
        cache.layer(READOUT, layer).normal_(generator=generator)
    before = cache.layer(READOUT, 3).clone()
    slots, positions = torch.tensor([0, 1]), torch.tensor([2, 1])
    model.readout(torch.ones(2, 16, dtype=like.dtype), SlotContext(cache, slots, positions, 3).at(READOUT))
    after = cache.layer(READOUT, 3)
    for slot, length in ((0, 2), (1, 1)):
        assert torch.equal(after[:, slot, :, :length], before[:, slot, :, :length])  # the committed positions
    assert torch.equal(after[:, 0, :, 3], before[:, 0, :, 3])


def replaying_eagerly(record: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Stands where a CUDA graph would: fixed buffers, and the same operations at every replay."""
    out = record().clone()

    def replay() -> None:
        out.copy_(record())

    return replay, out


@pytest.mark.parametrize("kv_mode", ["latest", "absent", "modulo-2"])
def test_fixed_shapes_decode_the_same_tokens(kv_mode: str) -> None:
    model = tiny_huginn()
    policy = middling(model, "latent-diff")
    wanted = run(model, prompts(), policy, kv_mode=kv_mode, slots=5)
    plan = Plan(5, 16, STEPS, KvMode.parse(kv_mode), "adaptive", 0, Sampling(), frozenset(), spare=True)
    queue = (Request(i, np.array(p), 5, prefill=len(p) if kv_mode != "modulo-2" else 0) for i, p in enumerate(prompts()))
    core = GraphedCore(model, replaying_eagerly, Workspace())
    results = [p.decoded() for p in SlotEngine(model, policy, plan, Meter(), core).run(queue)]
    assert sorted(results, key=lambda r: r.uid) == wanted
    assert {rows for _, rows, _ in core.steps} <= {1, 2, 4, 8}


def test_a_graph_needs_cuda() -> None:
    with pytest.raises(UserError, match="needs a CUDA device"):
        run(tiny_huginn(), prompts(1), FixedDepth(2), mode="graph")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"slots": 0}, "slots 0 must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens 0 must be at least 1"),
        ({"max_new_tokens": 80}, "exceed the model's 64 positions"),
        ({"uids": [1, 1]}, "2 prompts need as many different uids"),
        ({"mode": "eagre"}, "did you mean 'eager'"),
        ({"kv_mode": "rerun"}, "kv_mode 'rerun' saves no work"),
    ],
)
def test_a_wrong_setting_is_the_users_to_mend(how: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tiny_huginn(), [[1], [2]], FixedDepth(2), **how)


def test_an_empty_prompt_is_the_users_to_mend() -> None:
    with pytest.raises(UserError, match="empty prompt"):
        run(tiny_huginn(), [[1], []], FixedDepth(2))


def test_logits_rules_are_refused_where_there_are_several_loops() -> None:
    with pytest.raises(UserError, match="last loop only"):
        run(TwoLoops(), [[1]], AnyOf((ThresholdPolicy("kl", 0.1),)))
