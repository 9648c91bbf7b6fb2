"""What a language-model task asks of a model, and how questions become sequences to run.

Shapes: S sequences, A asks, T positions.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from halting_bench.benchmarks.base import NOT_SCORED, Sequence
from halting_bench.benchmarks.tokenizer import Tokenizer
from halting_bench.errors import UserError

USUAL_LENGTH = 2048
"""Positions of one forward unless told otherwise, where a model has as many."""


@dataclass(frozen=True)
class Continuation:
    """How likely is this continuation, and is it what greedy decoding would give?"""

    context: str
    continuation: str


@dataclass(frozen=True)
class Whole:
    """How likely is this text?"""

    text: str


@dataclass(frozen=True)
class Generation:
    """Go on from here."""

    context: str
    until: tuple[str, ...]  # the text ends before the first of these
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True)
class Ask:
    """One question of a task."""

    task: str
    document: int  # 0-based, over all tasks of a suite
    place: int  # of the document in its task
    index: int  # of the question in its document
    repeats: int  # how many answers are wanted
    body: Continuation | Whole | Generation

    @property
    def kind(self) -> str:
        """The kind's name in lm-eval."""
        return {Continuation: "loglikelihood", Whole: "loglikelihood_rolling", Generation: "generate_until"}[type(self.body)]

    def uid(self, part: int) -> int:
        """Seeds the initial states and draws of one of its sequences, whatever else runs beside it. 63 bits."""
        name = f"{self.task}/{self.place}/{self.index}/{part}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


Answer = tuple[float, bool] | float | str
"""Of a Continuation: its log-likelihood in nats, and whether it is greedy; of a Whole: the log-likelihood; or the new text."""


@dataclass
class Encoded:
    """The sequences of scoring asks, and how many tokens did not fit."""

    sequences: list[Sequence] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)  # [S], index into the asks
    truncated_asks: int = 0
    dropped_tokens: int = 0


def encode_scoring(asks: list[Ask], tokenizer: Tokenizer, max_length: int) -> Encoded:
    """The sequences of all asks that are scored, in order; those that generate have none.

    A context that does not fit loses tokens on its left. A long text is cut into windows, each token being scored once
    with as much context as fits.

    Args:
        asks: questions.
        tokenizer: the model's.
        max_length: positions of one forward.

    Raises:
        UserError: a continuation is longer than that.
    """
    encoded = Encoded()
    for number, ask in enumerate(asks):
        if isinstance(ask.body, Continuation):
            _encode_continuation(encoded, number, ask, ask.body, tokenizer, max_length)
        elif isinstance(ask.body, Whole):
            _encode_whole(encoded, number, ask, ask.body, tokenizer, max_length)
    return encoded


def _encode_continuation(
    encoded: Encoded, number: int, ask: Ask, body: Continuation, tokenizer: Tokenizer, max_length: int
) -> None:
    context, continuation = continuation_tokens(body, tokenizer)
    if len(continuation) > max_length:
        raise UserError(
            f"task '{ask.task}', document {ask.place}: a continuation of {len(continuation)} tokens exceeds "
            f"{max_length} positions: raise --max-length"
        )
    dropped = max(0, len(context) + len(continuation) - max_length - 1)
    encoded.truncated_asks += dropped > 0
    encoded.dropped_tokens += dropped
    tokens = (context + continuation)[dropped:]
    _add(encoded, number, ask, 0, tokens[:-1], continuation)


def continuation_tokens(body: Continuation, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Context and continuation, cut as lm-eval cuts them: spaces at the context's end go to the continuation.

    An empty context is the start token; when the continuation itself begins with that token, it is the context.
    """
    text = body.context.rstrip()
    continuation = body.context[len(text) :] + body.continuation
    if text:
        context, whole = tokenizer.encode(text), tokenizer.encode(text + continuation)
        return context, whole[len(context) :]
    tokens = tokenizer.encode(continuation)
    start = tokenizer.encoding().start
    return (tokens[:1], tokens[1:]) if tokens[:1] == [start] else ([start], tokens)


def _encode_whole(encoded: Encoded, number: int, ask: Ask, body: Whole, tokenizer: Tokenizer, max_length: int) -> None:
    tokens = tokenizer.encode(body.text)
    ids = [tokenizer.encoding().start, *tokens]
    done = 0
    while done < len(tokens):
        end = min(done + max_length, len(tokens))
        first = max(0, end - max_length)  # a last window that is short reaches back for context
        _add(encoded, number, ask, done, ids[first:end], tokens[done:end])
        done = end


def _add(encoded: Encoded, number: int, ask: Ask, part: int, inputs: list[int], scored: list[int]) -> None:
    if not scored:  # an empty continuation is certain: nothing to run
        return
    targets = np.full(len(inputs), NOT_SCORED, np.int64)
    targets[-len(scored) :] = scored
    encoded.sequences.append(Sequence(ask.document, ask.uid(part), np.array(inputs, np.int64), targets))
    encoded.owner.append(number)


def encode_prompt(body: Generation, tokenizer: Tokenizer, max_length: int) -> tuple[list[int], int]:
    """The prompt of a generation, its left end cut off where it does not fit beside the new tokens; and how many were cut."""
    tokens = tokenizer.encode(body.context) or [tokenizer.encoding().start]
    dropped = max(0, len(tokens) - max(1, max_length - body.max_new_tokens))
    return tokens[dropped:], dropped


class AnswerSums:
    """Sums scored rows by question, for G operating points at once; rows may come in any order and in parts."""

    def __init__(self, asks: list[Ask], encoded: Encoded, points: int):
        self._asks = asks
        uids = np.array([sequence.uid for sequence in encoded.sequences], np.int64)
        self._order = np.argsort(uids)
        self._uids = uids[self._order]
        self._owner = np.array(encoded.owner, np.int64)
        self.total = np.zeros((points, len(asks)))  # log-likelihoods, nats
        self.wrong = np.zeros((points, len(asks)), bool)

    def owner(self, sequence: np.ndarray) -> np.ndarray:
        """The index of each sequence's question. int64 uids [N] -> [N]."""
        found: np.ndarray = self._owner[self._order[np.searchsorted(self._uids, sequence)]]
        return found

    def add(self, sequence: np.ndarray, loss: np.ndarray, correct: np.ndarray) -> None:
        """Adds rows.

        Args:
            sequence: int64 [N], uids.
            loss: [G, N] nats; NaN where a state broke.
            correct: bool [G, N], whether the target is the argmax.
        """
        owner = self.owner(sequence)
        for point in range(len(self.total)):
            self.total[point] -= np.bincount(owner, loss[point].astype(np.float64), minlength=len(self._asks))
            self.wrong[point] |= np.bincount(owner, ~correct[point].astype(bool), minlength=len(self._asks)) > 0

    def answers(self, point: int) -> dict[int, list[Answer]]:
        """Index of the question -> its answer, once a repeat; questions that generate have none."""
        found: dict[int, list[Answer]] = {}
        sums = zip(self._asks, self.total[point].tolist(), self.wrong[point].tolist(), strict=True)
        for number, (ask, value, wrong) in enumerate(sums):
            if isinstance(ask.body, Whole):
                found[number] = [value] * ask.repeats
            elif isinstance(ask.body, Continuation):
                found[number] = [(value, not wrong)] * ask.repeats
        return found
