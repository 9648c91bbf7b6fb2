"""What the one pass records: nothing but the model and the text decides it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from runtime_models import TwoLoops, texts
from toy_traces import SEED, STEPS, between_scores, free_signal, live, plan, sequences, signals, toy, whole_trace

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.toy import toy_model
from halting_bench.benchmarks.base import NOT_SCORED, Sequence
from halting_bench.engine.trace import Shard, TracePlan, pad_batch, trace
from halting_bench.halting.policies import ThresholdPolicy
from halting_bench.halting.policy import HaltingPolicy, State, Verdict, View
from halting_bench.plan import build_policy

R = STEPS["huginn"]
INDEX = ("document", "position", "target", "sequence", "code/parity")


def small(texts: list[Sequence], model: RecurrentModel | None = None, **changes: object) -> Shard:
    return trace(model or toy("huginn"), texts, TracePlan(("latent-diff", "kl"), R, SEED, **changes))


def assert_same(found: Shard, wanted: Shard) -> None:
    """Integers exactly, reals to 1e-10."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-10, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("batch_tokens", [1, 9, 20, 10_000])
@pytest.mark.parametrize("model", STEPS)
def test_the_size_of_a_batch_and_so_padding_change_nothing(model, batch_tokens):
    made = trace(toy(model), sequences(), TracePlan(signals(model), STEPS[model], SEED, batch_tokens=batch_tokens))
    assert_same(made, whole_trace(model))


def test_shards_joined_are_the_trace_of_all():
    texts, whole = sequences(), small(sequences())
    parts = [small(texts[:2]), small(texts[2:3]), small(texts[3:])]
    assert_same({name: np.concatenate([part[name] for part in parts]) for name in whole}, whole)


def test_rows_come_in_the_order_of_the_sequences_and_their_positions():
    texts, shard = sequences(), small(sequences())
    scored = [(t.uid, t.document, p, t.targets[p], t.codes["parity"][p]) for t in texts for p in np.flatnonzero(t.targets >= 0)]
    found = zip(*(shard[name] for name in ("sequence", "document", "position", "target", "code/parity")), strict=True)
    assert [tuple(int(v) for v in row) for row in found] == [tuple(int(v) for v in row) for row in scored]


def test_the_order_of_the_sequences_changes_no_row():
    texts = sequences()
    forward, backward = small(texts), small(texts[::-1])
    order = np.lexsort((backward["position"], backward["sequence"]))
    assert_same({name: value[order] for name, value in backward.items()}, forward)


def test_what_comes_after_a_position_is_not_seen_there():
    text = sequences()[0]
    changed = Sequence(text.document, text.uid, np.append(text.tokens[:-1], 7), text.targets, text.codes)
    before, after = small([text])["loss"], small([changed])["loss"]
    last = int(text.targets[-1] != NOT_SCORED)
    np.testing.assert_allclose(after[: len(after) - last], before[: len(before) - last], rtol=0, atol=1e-12)


def test_another_seed_gives_another_initial_state_and_the_same_seed_the_same():
    texts = sequences(2)
    one, two = (trace(toy("huginn"), texts, TracePlan((), R, seed)) for seed in (SEED, SEED + 1))
    assert_same(trace(toy("huginn"), texts, TracePlan((), R, SEED)), one)
    assert not np.allclose(one["loss"], two["loss"])


def test_saturation_is_the_first_step_from_which_the_argmax_stays():
    texts = sequences(6, seed=1)
    shard = small(texts)
    answers = np.stack([live_argmax(texts, k) for k in range(1, R + 1)], axis=1)
    wanted = [next(k for k in range(1, R + 1) if len(set(row[k - 1 :].tolist())) == 1) for row in answers]
    assert shard["saturation"].tolist() == wanted
    assert len(set(wanted)) > 2


def live_argmax(texts: list[Sequence], depth: int) -> np.ndarray:
    from halting_bench.architectures.noise import initial_noise

    found = []
    for text in texts:
        noise = initial_noise(SEED, np.full((1, 1), text.uid), np.arange(len(text.tokens))[None], toy("huginn").spec.width)
        logits = toy("huginn")(torch.from_numpy(text.tokens)[None], depth, noise)[0]
        found.append(logits.argmax(-1).numpy()[text.targets != NOT_SCORED])
    return np.concatenate(found)


def test_one_pass_runs_each_core_step_and_each_readout_once():
    calls = dict.fromkeys(("embed", "step", "readout"), 0)
    model = toy_model(dtype=torch.float64)

    def counting(name: str, method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(*args: object) -> torch.Tensor:
            out = method(*args)
            calls[name] += out.shape[0] * out.shape[1]
            return out

        return counted

    for name in calls:
        setattr(model, name, counting(name, getattr(model, name)))
    texts = [Sequence(i, i, np.arange(6), np.arange(6)) for i in range(4)]
    trace(model, texts, TracePlan(signals("huginn"), R, SEED, batch_tokens=12))
    assert calls == {"embed": 24, "step": 24 * R, "readout": 24 * R}


def test_sequences_without_scored_positions_and_no_sequences_give_no_rows():
    silent = Sequence(1, 1, np.arange(4), np.full(4, NOT_SCORED))
    assert small([silent])["loss"].shape == small([])["loss"].shape == (0, R)
    both = small([silent, *sequences(1)])
    assert_same({name: both[name] for name in ("loss", "score/kl")}, {k: small(sequences(1))[k] for k in ("loss", "score/kl")})


def test_float32_models_give_float32_scores():
    shard = small(sequences(1), toy_model(dtype=torch.float32))
    assert shard["loss"].dtype == shard["score/kl"].dtype == np.float32


def test_a_batch_is_padded_to_the_right_with_positions_that_are_not_scored():
    long, short = Sequence(0, 0, np.array([5, 6, 7]), np.array([1, 2, 3])), Sequence(0, 1, np.array([8]), np.array([9]))
    tokens, targets = pad_batch([long, short])
    assert tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert targets.tolist() == [[1, 2, 3], [9, NOT_SCORED, NOT_SCORED]]


# States that break.


class Breaking(torch.nn.Module):
    """The toy, whose state of every row with token 99 becomes NaN at a step."""

    def __init__(self, at: int):
        super().__init__()
        self.inner, self.at, self.calls = toy_model(dtype=torch.float64), at, 0
        self.spec = self.inner.spec

    def embed(self, tokens: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        self.broken, self.calls = tokens == 99, 0
        return self.inner.embed(tokens, context)

    def begin(self, *args: object) -> torch.Tensor:
        return self.inner.begin(*args)

    def step(self, loop: int, state: torch.Tensor, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        self.calls += 1
        out = self.inner.step(loop, state, x, context)
        return torch.where((self.broken & (self.calls == self.at))[..., None], torch.nan, out)

    def end(self, *args: object) -> torch.Tensor:
        return self.inner.end(*args)

    def readout(self, *args: object) -> torch.Tensor:
        return self.inner.readout(*args)


@pytest.mark.parametrize("at", [1, 3, R])
def test_a_state_that_breaks_is_known_by_its_step_and_has_no_loss_from_there(at):
    whole = Sequence(1, 1, np.array([5, 99, 6, 7]), np.array([1, 2, 3, 4]))
    other = Sequence(2, 2, np.array([5, 6]), np.array([1, 2]))
    shard = small([whole, other], Breaking(at))
    assert shard["last_step"].tolist() == [R + 1, at, at, at, R + 1, R + 1]  # earlier rows and other sequences go on
    steps = np.arange(1, R + 1)
    np.testing.assert_array_equal(np.isnan(shard["loss"]), steps >= shard["last_step"][:, None])
    assert not shard["correct"][steps >= shard["last_step"][:, None]].any()
    clean = small([whole, other])
    np.testing.assert_allclose(shard["loss"][:, : at - 1], clean["loss"][:, : at - 1], rtol=0, atol=1e-12)
    for rows in (slice(0, 1), slice(4, None)):
        np.testing.assert_allclose(shard["loss"][rows], clean["loss"][rows], rtol=0, atol=1e-12)


# Policies that ride along.


@dataclass(frozen=True)
class Failing(HaltingPolicy):
    """Raises at a step (0: when it is started)."""

    at: int

    def init(self, view: View) -> State:
        if self.at == 0:
            raise ValueError("no luck")
        return {}

    def step(self, view: View, state: State) -> tuple[Verdict, State]:
        if int(view.step[0]) == self.at:
            raise ValueError("no luck")
        return Verdict(torch.zeros_like(view.step, dtype=torch.bool), view.latent[:, 0]), state


@dataclass(frozen=True)
class Confused(HaltingPolicy):
    """Answers for the whole batch at once."""

    def init(self, view: View) -> State:
        return {}

    def step(self, view: View, state: State) -> tuple[Verdict, State]:
        return Verdict(torch.tensor(True), view.latent[:, 0]), state


@dataclass(frozen=True)
class Hasty(HaltingPolicy):
    """Wants a readout before there is one."""

    def init(self, view: View) -> State:
        return {"first": view.logits()}

    def step(self, view: View, state: State) -> tuple[Verdict, State]:
        return Verdict(view.step > 2, view.latent[:, 0]), state


RIDING = [("huginn", "kl-two-hits"), ("huginn", "entropy-and-kl"), ("huginn", "step-ratio"), ("ouro", "gate-cdf")]


@pytest.mark.parametrize(("model", "recipe"), RIDING)
def test_a_policy_that_rides_along_exits_where_it_would_have_lived(model, recipe):
    planned = plan(model, recipe)
    threshold = between_scores(whole_trace(model)[f"score/{free_signal(planned)}"], (0.5,))[0]
    policy = build_policy(planned.recipe, threshold)
    for batch_tokens in (1, 1000):
        shard = trace(toy(model), sequences(), TracePlan((), STEPS[model], SEED, {"mine@1": policy}, batch_tokens))
        np.testing.assert_array_equal(shard["exit/mine@1"], live(toy(model), sequences(), policy, STEPS[model]).exits)


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (Failing(0), "ValueError: no luck (test_trace.py, line "),
        (Failing(5), "ValueError: no luck (test_trace.py, line "),
        (Confused(), "TypeError: a verdict's halt must be torch.bool ["),
        (Hasty(), "LookupError: a readout of the initial state is not defined (policy.py, line "),
    ],
)
def test_a_policy_that_raises_drops_out_with_its_error_and_the_rest_goes_on(policy, error):
    good = ThresholdPolicy("latent-diff", 0.3)
    shard = small(sequences(), opaque={"bad": policy, "good": good}, batch_tokens=10)
    assert shard["error/bad"].tobytes().decode().startswith(error)
    assert "exit/bad" not in shard
    assert_same({k: v for k, v in shard.items() if k != "error/bad"}, small(sequences(), opaque={"good": good}))


def test_a_model_of_several_loops_is_not_traced_as_if_it_had_one() -> None:
    with pytest.raises(ValueError, match="of 2 loops cannot be traced"):
        trace(TwoLoops(), texts(2), TracePlan((), 4, 0))
