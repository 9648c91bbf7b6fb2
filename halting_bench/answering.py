"""Answers a suite's questions with a model and a policy that acts: scoring and generation, task by task, counted.

Operating points that differ in their threshold alone are answered side by side, in the same batches.
Shapes: G operating points, A questions, N tokens, L loops, D = max_steps times loops, and 1.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.asks import Answer, AnswerSums, Ask, Generation, encode_prompt, encode_scoring
from halting_bench.benchmarks.tokenizer import Tokenizer
from halting_bench.engine.decode import stream
from halting_bench.engine.meter import Meter
from halting_bench.engine.requests import Decoded, Request
from halting_bench.engine.sampling import Sampling
from halting_bench.engine.score import execute
from halting_bench.errors import UserError
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.records import Outcome


@dataclass(frozen=True)
class Point:
    """One operating point and how it is run."""

    policy: HaltingPolicy
    max_steps: int
    max_length: int  # positions of one forward
    kv_mode: str = "latest"
    prefill: str = "adaptive"
    seed: int = 0
    batch_rows: int = 4096
    slots: int = 32


@dataclass
class Work:
    """What the questions of one kind of one task took, all rows that ran: prompts too, and every point of the batch."""

    embeds: int = 0
    core_steps: int = 0
    readouts: int = 0
    prompt_tokens: int = 0
    prompt_core_steps: int = 0
    truncated_questions: int = 0
    dropped_tokens: int = 0


class Answered:
    """Answers to A questions at one operating point, and how deep their scored or newly made tokens went."""

    def __init__(self, asks: Sequence[Ask], loops: int, max_steps: int, work: dict[tuple[str, str], Work]):
        self.asks = asks
        self.work = work  # of each (task, kind of question); points of one batch share it
        self.answers: dict[int, list[Answer]] = {}  # index of the question -> one answer a repeat
        self.histogram = np.zeros((len(asks), loops * max_steps + 1), np.int64)  # [A, D] tokens by core applications
        self.outcomes = np.zeros((len(asks), len(Outcome)), np.int64)
        self.never_fired = np.zeros(len(asks), np.int64)
        self.context = np.zeros(len(asks), np.int64)  # summed over tokens: positions that each attends to
        self.steps = np.zeros((len(asks), loops), np.int64)  # [A, L] core applications
        self.step_context = np.zeros((len(asks), loops), np.int64)  # [A, L] the context of every core application, summed

    def count(
        self, number: np.ndarray, steps: np.ndarray, context: np.ndarray, outcomes: np.ndarray, never: np.ndarray
    ) -> None:
        """Counts tokens.

        Args:
            number: int64 [N], the question that each belongs to.
            steps: int64 [N, L], core applications in each loop.
            context: int64 [N], positions that each attends to.
            outcomes: int [N], records.Outcome.
            never: int or bool [N], whether no rule would ever have fired.
        """
        np.add.at(self.histogram, (number, steps.sum(axis=1)), 1)
        np.add.at(self.outcomes, (number, outcomes), 1)
        np.add.at(self.never_fired, number, never)
        np.add.at(self.context, number, context)
        np.add.at(self.steps, number, steps)
        np.add.at(self.step_context, number, steps * context[:, None])

    def summary(self) -> dict[str, dict[str, Any]]:
        """Figures by task and kind, JSON-able: the proof that the policy acted on every kind of question."""
        found: dict[str, dict[str, Any]] = {}
        for (task, kind), work in self.work.items():
            mine = [i for i, ask in enumerate(self.asks) if (ask.task, ask.kind) == (task, kind)]
            histogram, outcomes = self.histogram[mine].sum(axis=0), self.outcomes[mine].sum(axis=0)
            tokens = int(histogram.sum())
            found.setdefault(task, {})[kind] = {
                "questions": len(mine),
                "tokens": tokens,
                "mean_depth": float(histogram @ np.arange(len(histogram))) / tokens if tokens else None,
                "mean_prompt_depth": work.prompt_core_steps / work.prompt_tokens if work.prompt_tokens else None,
                "depth_histogram": {str(step): int(n) for step, n in enumerate(histogram) if n},
                **{outcome.name.lower(): int(outcomes[outcome]) for outcome in Outcome},
                "never_fired": int(self.never_fired[mine].sum()),
                **vars(work),
            }
        return found


def check_model(model: RecurrentModel, tokenizer: Tokenizer) -> None:
    """Raises UserError when a model cannot answer questions about text."""
    if not model.spec.causal:
        raise UserError(f"a {model.spec.family} model is not causal: lm-eval's questions need a model that reads left to right")
    start = tokenizer.encoding().start
    if not 0 <= start < model.spec.vocab_size:
        raise UserError(f"the start token {start} lies outside the model's vocabulary of {model.spec.vocab_size}")


Thresholds = Sequence[float | None]
"""One an operating point; None: the policy's own."""


def answer(model: RecurrentModel, tokenizer: Tokenizer, asks: Sequence[Ask], point: Point) -> Answered:
    """Runs every question with the policy acting.

    Raises:
        UserError: a question does not fit the model, or a name is unknown.
    """
    return answer_points(model, tokenizer, asks, point, [None])[0]


def answer_points(
    model: RecurrentModel, tokenizer: Tokenizer, asks: Sequence[Ask], point: Point, thresholds: Thresholds
) -> list[Answered]:
    """`answer` at several thresholds of the policy: the same answers as one after another, from shared batches.

    Raises:
        UserError: as `answer`; or the policy has no single threshold.
    """
    check_model(model, tokenizer)
    work: dict[tuple[str, str], Work] = {}
    done = [Answered(asks, len(model.spec.loops), point.max_steps, work) for _ in thresholds]
    for task, kind in dict.fromkeys((ask.task, ask.kind) for ask in asks):
        numbers = [i for i, ask in enumerate(asks) if (ask.task, ask.kind) == (task, kind)]
        run = _generate if isinstance(asks[numbers[0]].body, Generation) else _score
        work[task, kind] = run(model, tokenizer, done, numbers, point, thresholds)
    return done


def _score(
    model: RecurrentModel,
    tokenizer: Tokenizer,
    done: list[Answered],
    numbers: list[int],
    point: Point,
    thresholds: Thresholds,
) -> Work:
    asks = [done[0].asks[i] for i in numbers]
    encoded = encode_scoring(asks, tokenizer, point.max_length)
    own = [t for t in thresholds if t is not None]
    ran = execute(
        model,
        encoded.sequences * len(done),
        point.policy,
        thresholds=np.repeat(own, len(encoded.sequences)) if own else None,
        max_steps=point.max_steps,
        kv_mode=point.kv_mode,
        prefill=point.prefill,
        seed=point.seed,
        batch_rows=point.batch_rows,
    )
    each = len(ran.sequence) // len(done)  # tokens of a point
    sequence = ran.sequence[:each]
    sums = AnswerSums(asks, encoded, len(done))
    sums.add(sequence, ran.loss.reshape(len(done), each), ran.correct.reshape(len(done), each))
    owner = np.array(numbers, np.int64)[sums.owner(sequence)]
    for number, answered in enumerate(done):
        answered.answers |= {numbers[i]: found for i, found in sums.answers(number).items()}
        own_rows = slice(number * each, (number + 1) * each)
        context, never = ran.position[own_rows] + 1, ran.never_fired[own_rows]
        answered.count(owner, ran.exit_per_loop[own_rows], context, ran.outcome[own_rows], never)
    return Work(
        embeds=ran.embeds,
        core_steps=ran.core_steps,
        readouts=ran.readouts,
        prompt_tokens=len(done) * sum(len(s.tokens) for s in encoded.sequences) - len(ran.exit_step),
        prompt_core_steps=ran.core_steps - int(ran.exit_step.sum()),
        truncated_questions=encoded.truncated_asks,
        dropped_tokens=encoded.dropped_tokens,
    )


@dataclass(frozen=True)
class _Draft:
    """A text to be made: at which point, the answer to which question, of which of its repeats."""

    place: int  # of the point
    number: int
    repeat: int
    body: Generation


def _generate(
    model: RecurrentModel,
    tokenizer: Tokenizer,
    done: list[Answered],
    numbers: list[int],
    point: Point,
    thresholds: Thresholds,
) -> Work:
    work, meter = Work(), Meter()
    groups: dict[Sampling, list[tuple[_Draft, Request]]] = {}
    for number in numbers:
        ask = done[0].asks[number]
        if not isinstance(ask.body, Generation):
            raise TypeError(f"a {ask.kind} question is not generated")
        tokens, dropped = encode_prompt(ask.body, tokenizer, point.max_length)
        work.truncated_questions += dropped > 0
        work.dropped_tokens += dropped
        sampling = Sampling(ask.body.temperature, ask.body.top_k, ask.body.top_p, point.seed)
        ends = _stop_check(tokenizer, ask.body.until)
        for repeat in range(1 if sampling.greedy else ask.repeats):
            prompt = Request(ask.uid(repeat), np.array(tokens, np.int64), ask.body.max_new_tokens, ends=ends)
            for place, threshold in enumerate(thresholds):
                draft = _Draft(place, number, repeat, ask.body)
                groups.setdefault(sampling, []).append((draft, replace(prompt, threshold=threshold)))
    texts: dict[tuple[int, int, int], str | float] = {}
    for sampling, queue in groups.items():
        drafts = {request.key: draft for draft, request in queue}
        for made in _stream(model, tokenizer, [request for _, request in queue], point, sampling, meter):
            draft, count = drafts[made.uid, made.threshold], len(made.tokens)
            outcomes = np.array(made.outcomes, np.int64)
            texts[draft.place, draft.number, draft.repeat] = _text(tokenizer, made, draft.body.until)
            done[draft.place].count(
                np.full(count, draft.number),
                np.array(made.loop_steps, np.int64).reshape(count, len(model.spec.loops)),
                len(made.prompt_steps) + np.arange(count),
                outcomes,
                (outcomes == Outcome.EXHAUSTED) & ~np.array(made.fired, bool),
            )
            work.prompt_tokens += max(len(made.prompt_steps) - 1, 0)  # the last one makes the first new token
            work.prompt_core_steps += sum(made.prompt_steps[:-1])
    work.embeds, work.core_steps, work.readouts = meter.embeds, meter.core_steps, meter.readouts
    for place, answered in enumerate(done):
        for number in numbers:
            greedy, repeats = texts[place, number, 0], answered.asks[number].repeats
            answered.answers[number] = [texts.get((place, number, repeat), greedy) for repeat in range(repeats)]
    return work


def _stream(
    model: RecurrentModel, tokenizer: Tokenizer, requests: list[Request], point: Point, sampling: Sampling, meter: Meter
) -> Iterator[Decoded]:
    return stream(
        model,
        requests,
        point.policy,
        max_prompt=max(len(r.tokens) for r in requests),
        max_new_tokens=max(r.max_new_tokens for r in requests),
        max_steps=point.max_steps,
        slots=min(point.slots, len(requests)),
        sampling=sampling,
        stop=() if tokenizer.end is None else (tokenizer.end,),
        kv_mode=point.kv_mode,
        prefill=point.prefill,
        seed=point.seed,
        meter=meter,
    )


def _stop_check(tokenizer: Tokenizer, until: tuple[str, ...]) -> Callable[[list[int]], bool] | None:
    """Whether the tokens so far hold a stop string. Only their end is looked at: earlier calls saw the rest."""
    if not until:
        return None
    pattern = re.compile("|".join(map(re.escape, until)))
    reach = max(len(stop.encode()) for stop in until) + 8  # a token stands for a byte at least, or is special

    def ends(tokens: list[int]) -> bool:
        return pattern.search(tokenizer.decode(tokens[-reach:])) is not None

    return ends


def _text(tokenizer: Tokenizer, made: Decoded, until: tuple[str, ...]) -> str | float:
    """The new text before the first stop string; NaN where the state broke: what came before is no answer."""
    if made.stopped == "nonfinite":
        return math.nan
    whole = tokenizer.decode([token for token in made.tokens if token != tokenizer.end])
    return min((whole.split(stop)[0] for stop in until), key=len, default=whole)
