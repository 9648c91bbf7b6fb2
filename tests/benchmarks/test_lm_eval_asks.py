"""Questions cut into tokens as lm-eval cuts them, and answers summed from rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halting_bench.answering import answer, answer_points
from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.toy import toy_model
from halting_bench.benchmarks.asks import (
    Ask,
    Continuation,
    Generation,
    Whole,
    continuation_tokens,
    encode_prompt,
    encode_scoring,
)
from halting_bench.benchmarks.base import NOT_SCORED
from halting_bench.benchmarks.lm_eval_asks import to_ask
from halting_bench.benchmarks.lm_eval_results import first_broken
from halting_bench.benchmarks.tokenizer import ByteTokenizer
from halting_bench.engine.trace import batch_noise
from halting_bench.errors import UserError
from halting_bench.halting.policies import FixedDepth, ThresholdPolicy
from tests.benchmarks.lm_eval_fixtures import BYTES, executed_point


def ask(body: Continuation | Whole | Generation, document: int = 0, repeats: int = 1) -> Ask:
    return Ask("t", document, document, 0, repeats, body)


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=8))
def test_a_continuation_is_cut_where_lm_eval_cuts_it(context: str, continuation: str) -> None:
    from lm_eval.api.model import TemplateLM

    class Bytes(TemplateLM):
        eot_token_id = 0

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
            return list(string.encode())

        def _loglikelihood_tokens(self, requests, **kwargs):  # type: ignore[no-untyped-def]
            raise NotImplementedError

        loglikelihood_rolling = generate_until = _loglikelihood_tokens

    if context.strip():
        assert continuation_tokens(Continuation(context, continuation), BYTES) == Bytes()._encode_pair(context, continuation)


def test_an_empty_context_is_the_start_token_unless_the_continuation_begins_with_it() -> None:
    assert continuation_tokens(Continuation("", " ab"), BYTES) == ([0], [32, 97, 98])
    assert continuation_tokens(Continuation("", "\0ab"), BYTES) == ([0], [97, 98])


@given(st.integers(1, 40), st.integers(2, 9))
def test_windows_of_a_long_text_are_lm_eval_s(length: int, width: int) -> None:
    from lm_eval.utils import get_rolling_token_windows

    text = "".join(chr(97 + i % 26) for i in range(length))
    sequences = encode_scoring([ask(Whole(text))], BYTES, width).sequences
    theirs = list(get_rolling_token_windows(list(text.encode()), 0, width, 1))
    assert [s.tokens.tolist() for s in sequences] == [inputs for inputs, _ in theirs]
    assert [s.targets[s.targets != NOT_SCORED].tolist() for s in sequences] == [scored for _, scored in theirs]


def test_a_context_that_does_not_fit_loses_its_left_end_and_is_counted() -> None:
    encoded = encode_scoring([ask(Continuation("abcdefgh", "XY")), ask(Continuation("a", "b"), 1)], BYTES, 4)
    assert encoded.sequences[0].tokens.tolist() == list(b"fghX")
    assert encoded.sequences[0].targets.tolist() == [NOT_SCORED, NOT_SCORED, *b"XY"]
    assert (encoded.truncated_asks, encoded.dropped_tokens) == (1, 5)
    assert encode_prompt(Generation("abcdefgh", (), 3), BYTES, 8) == (list(b"defgh"), 3)
    with pytest.raises(UserError, match="a continuation of 6 tokens exceeds 4 positions"):
        encode_scoring([ask(Continuation("a", "bcdefg"))], BYTES, 4)


def test_a_uid_depends_on_the_question_alone() -> None:
    first = ask(Whole("a"), document=3)
    assert first.uid(0) == Ask("t", 99, 3, 0, 1, Whole("b")).uid(0)
    assert len({first.uid(0), first.uid(1), ask(Whole("a"), document=4).uid(0)}) == 3


def plain(model: RecurrentModel, body: Continuation, uid_of: Ask, depth: int) -> tuple[float, bool]:
    """Log-likelihood by the model's plain forward."""
    context, continuation = continuation_tokens(body, BYTES)
    tokens = torch.tensor([(context + continuation)[:-1]])
    sequence = encode_scoring([uid_of], BYTES, 64).sequences
    log_p = torch.log_softmax(model.forward(tokens, depth, batch_noise(model, sequence, tokens.shape[1], 0)), dim=-1)[0]
    rows = log_p[-len(continuation) :]
    gold = torch.tensor(continuation)
    return float(rows.gather(1, gold[:, None]).sum()), bool((rows.argmax(dim=-1) == gold).all())


def test_answers_at_a_uniform_depth_are_those_of_the_plain_forward() -> None:
    model = toy_model(dtype=torch.float64)
    asks = [ask(Continuation(f"some text {i}", " and more"), i) for i in range(3)]
    asks.append(ask(Whole("a whole text"), 3))
    found = answer(model, BYTES, asks, executed_point(FixedDepth(3), 5))
    for number in range(3):
        body = asks[number].body
        assert isinstance(body, Continuation)
        value, greedy = plain(model, body, asks[number], 3)
        answered = found.answers[number][0]
        assert isinstance(answered, tuple)
        assert answered[0] == pytest.approx(value, abs=1e-10)
        assert answered[1] == greedy
    figures = found.summary()["t"]
    assert figures["loglikelihood"]["depth_histogram"] == {"3": 27}
    assert figures["loglikelihood_rolling"]["depth_histogram"] == {"3": 12}
    assert figures["loglikelihood"]["prompt_core_steps"] == 3 * figures["loglikelihood"]["prompt_tokens"]


class Latin(ByteTokenizer):
    """Every byte is a character: whatever a model makes can be asked about."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("latin-1"))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("latin-1")


def test_what_a_model_makes_greedily_is_what_it_calls_greedy() -> None:
    model, point = toy_model(dtype=torch.float64), executed_point(ThresholdPolicy("latent-diff", 0.3), 5)
    made = answer(model, Latin(), [ask(Generation("go", (), 4))], point).answers[0][0]
    assert isinstance(made, str)
    other = made[:3] + ("a" if made[3] != "a" else "b")
    for text, greedy in ((made, True), (other, False)):
        found = answer(model, Latin(), [ask(Continuation("go", text))], point).answers[0][0]
        assert isinstance(found, tuple)
        assert found[1] == greedy


def test_a_stop_string_ends_the_text_and_the_work() -> None:
    model = toy_model()
    point = executed_point(FixedDepth(3), 5)
    whole = answer(model, BYTES, [ask(Generation("go on", (), 12))], point)
    text = whole.answers[0][0]
    assert isinstance(text, str)
    stop = text[3:5]
    cut = answer(model, BYTES, [ask(Generation("go on", (stop, "never"), 12))], point)
    assert cut.answers[0][0] == text.split(stop)[0]
    assert cut.histogram.sum() < whole.histogram.sum()
    assert cut.work["t", "generate_until"].core_steps < whole.work["t", "generate_until"].core_steps


def test_sampled_repeats_differ_and_greedy_ones_are_made_once() -> None:
    model, point = toy_model(), executed_point(FixedDepth(2), 5)
    sampled = answer(model, BYTES, [ask(Generation("a", (), 6, temperature=1.0), repeats=3)], point)
    greedy = answer(model, BYTES, [ask(Generation("a", (), 6), repeats=3)], point)
    assert len(set(sampled.answers[0])) > 1
    assert len(greedy.answers[0]) == 3
    assert sampled.histogram.sum() == 3 * greedy.histogram.sum()


def test_points_that_share_batches_answer_as_each_does_alone() -> None:
    model = toy_model(dtype=torch.float64)
    asks = [ask(Continuation(f"some text {i}", " and more"), i) for i in range(3)]
    asks += [ask(Whole("a whole text"), 3), ask(Generation("go", ("e",), 5, temperature=1.0), 4, repeats=2)]
    for signal in ("latent-diff", "kl"):  # in rounds, and token by token
        point, thresholds = executed_point(ThresholdPolicy(signal, float("nan")), 5), [0.2, 0.4, 0.8]
        together = answer_points(model, BYTES, asks, point, thresholds)
        for threshold, shared in zip(thresholds, together, strict=True):
            alone = answer(model, BYTES, asks, executed_point(ThresholdPolicy(signal, threshold), 5))
            for name in ("histogram", "outcomes", "never_fired", "context", "steps", "step_context"):
                np.testing.assert_array_equal(getattr(shared, name), getattr(alone, name), err_msg=name)
            assert shared.answers[4] == alone.answers[4]
            for number in range(4):
                np.testing.assert_allclose(shared.answers[number], alone.answers[number], rtol=0, atol=1e-10)
        assert len({shared.histogram.tobytes() for shared in together}) == 3  # the thresholds do matter


def test_a_text_whose_state_broke_is_no_answer() -> None:
    model, asks = toy_model(), [ask(Generation("go on", (), 6), repeats=2)]
    with torch.no_grad():
        next(weight for name, weight in model.named_parameters() if "core" in name).fill_(torch.nan)
    found = answer(model, BYTES, asks, executed_point(FixedDepth(3), 5))
    assert np.isnan(found.answers[0]).all()
    assert first_broken(found.answers) == 0


class Fake:
    """A request of lm-eval's shape."""

    request_type, idx, task_name, doc_id, repeats = "generate_until", 0, "t", 0, 1

    def __init__(self, *args: object):
        self.args = args


def test_generation_arguments_mean_what_they_mean_to_lm_eval() -> None:
    numbers = {("t", 0): 0}
    sampling = {"temperature": 0.7, "top_p": 0.5}
    greedy = Fake("x", {"until": "a", "max_new_tokens": 9, "do_sample": False, **sampling})
    assert to_ask(greedy, numbers).body == Generation("x", ("a",), 9)
    assert to_ask(Fake("x", {}), numbers).body == Generation("x", (), 256)
    drawn = to_ask(Fake("x", {"do_sample": True, **sampling}), numbers)
    assert drawn.body == Generation("x", (), 256, 0.7, None, 0.5)
    with pytest.raises(UserError, match="generation argument 'num_beams'"):
        to_ask(Fake("x", {"num_beams": 2}), numbers)
    with pytest.raises(UserError, match="images or sound"):
        to_ask(Fake("x", {}, {"visual": None}), numbers)


def test_an_encoder_is_refused() -> None:
    from halting_bench.answering import check_model

    model = toy_model()
    model.spec = type(model.spec)(**{**vars(model.spec), "causal": False})
    with pytest.raises(UserError, match="reads left to right"):
        check_model(model, BYTES)


def test_an_empty_continuation_is_certain() -> None:
    asks = [ask(Continuation("a", "")), ask(Continuation("a", "b"), 1)]
    found = answer(toy_model(), BYTES, asks, executed_point(FixedDepth(2), 4))
    assert found.answers[0] == [(0.0, True)]
    assert np.isfinite(found.answers[1][0][0])  # type: ignore[index]
