"""Answers a suite's questions with a model and a policy that acts: scoring and generation, task by task, counted.

Shapes: A questions, N tokens, D = max_steps times loops, and 1.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    """What the questions of one kind of one task took, all rows that ran: prompts too."""

    embeds: int = 0
    core_steps: int = 0
    readouts: int = 0
    prompt_tokens: int = 0
    prompt_core_steps: int = 0
    truncated_questions: int = 0
    dropped_tokens: int = 0


class Answered:
    """Answers to A questions, and how deep their scored or newly made tokens went."""

    def __init__(self, asks: Sequence[Ask], deepest: int):
        self.asks = asks
        self.answers: dict[int, list[Answer]] = {}  # index of the question -> one answer a repeat
        self.histogram = np.zeros((len(asks), deepest + 1), np.int64)  # [A, D] tokens by core applications, all loops
        self.outcomes = np.zeros((len(asks), len(Outcome)), np.int64)
        self.never_fired = np.zeros(len(asks), np.int64)
        self.work: dict[tuple[str, str], Work] = {}  # of each (task, kind of question)

    def count(self, number: np.ndarray, steps: np.ndarray, outcomes: np.ndarray, never: np.ndarray) -> None:
        """Counts tokens, arrays [N]: the question that each belongs to, its depth, how it ended, whether no rule ever fired."""
        np.add.at(self.histogram, (number, steps), 1)
        np.add.at(self.outcomes, (number, outcomes), 1)
        np.add.at(self.never_fired, number, never)

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


def answer(model: RecurrentModel, tokenizer: Tokenizer, asks: Sequence[Ask], point: Point) -> Answered:
    """Runs every question with the policy acting.

    Raises:
        UserError: a question does not fit the model, or a name is unknown.
    """
    check_model(model, tokenizer)
    done = Answered(asks, point.max_steps * len(model.spec.loops))
    for task, kind in dict.fromkeys((ask.task, ask.kind) for ask in asks):
        numbers = [i for i, ask in enumerate(asks) if (ask.task, ask.kind) == (task, kind)]
        run = _generate if isinstance(asks[numbers[0]].body, Generation) else _score
        done.work[task, kind] = run(model, tokenizer, done, numbers, point)
    return done


def _score(model: RecurrentModel, tokenizer: Tokenizer, done: Answered, numbers: list[int], point: Point) -> Work:
    asks = [done.asks[i] for i in numbers]
    encoded = encode_scoring(asks, tokenizer, point.max_length)
    ran = execute(
        model,
        encoded.sequences,
        point.policy,
        max_steps=point.max_steps,
        kv_mode=point.kv_mode,
        prefill=point.prefill,
        seed=point.seed,
        batch_rows=point.batch_rows,
    )
    sums = AnswerSums(asks, encoded, 1)
    sums.add(ran.sequence, ran.loss[None], ran.correct[None])
    done.answers |= {numbers[i]: found for i, found in sums.answers(0).items()}
    done.count(np.array(numbers, np.int64)[sums.owner(ran.sequence)], ran.exit_step, ran.outcome, ran.never_fired)
    return Work(
        embeds=ran.embeds,
        core_steps=ran.core_steps,
        readouts=ran.readouts,
        prompt_tokens=sum(len(s.tokens) for s in encoded.sequences) - len(ran.exit_step),
        prompt_core_steps=ran.core_steps - int(ran.exit_step.sum()),
        truncated_questions=encoded.truncated_asks,
        dropped_tokens=encoded.dropped_tokens,
    )


@dataclass(frozen=True)
class _Draft:
    """A text to be made: the answer to which question, of which of its repeats."""

    number: int
    repeat: int
    body: Generation


def _generate(model: RecurrentModel, tokenizer: Tokenizer, done: Answered, numbers: list[int], point: Point) -> Work:
    work, meter = Work(), Meter()
    groups: dict[Sampling, dict[int, tuple[_Draft, Request]]] = {}
    for number in numbers:
        ask = done.asks[number]
        if not isinstance(ask.body, Generation):
            raise TypeError(f"a {ask.kind} question is not generated")
        tokens, dropped = encode_prompt(ask.body, tokenizer, point.max_length)
        work.truncated_questions += dropped > 0
        work.dropped_tokens += dropped
        sampling = Sampling(ask.body.temperature, ask.body.top_k, ask.body.top_p, point.seed)
        ends = _stop_check(tokenizer, ask.body.until)
        for repeat in range(1 if sampling.greedy else ask.repeats):
            request = Request(ask.uid(repeat), np.array(tokens, np.int64), ask.body.max_new_tokens, ends=ends)
            groups.setdefault(sampling, {})[request.uid] = _Draft(number, repeat, ask.body), request
    texts: dict[tuple[int, int], str] = {}
    for sampling, drafts in groups.items():
        for made in _stream(model, tokenizer, [request for _, request in drafts.values()], point, sampling, meter):
            draft = drafts[made.uid][0]
            texts[draft.number, draft.repeat] = _text(tokenizer, made, draft.body.until)
            steps, outcomes = np.array(made.steps, np.int64), np.array(made.outcomes, np.int64)
            done.count(np.full(len(steps), draft.number), steps, outcomes, np.zeros(len(steps), np.int64))
            work.prompt_tokens += max(len(made.prompt_steps) - 1, 0)  # the last one makes the first new token
            work.prompt_core_steps += sum(made.prompt_steps[:-1])
    work.embeds, work.core_steps, work.readouts = meter.embeds, meter.core_steps, meter.readouts
    for number in numbers:
        greedy = texts[number, 0]
        done.answers[number] = [texts.get((number, repeat), greedy) for repeat in range(done.asks[number].repeats)]
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


def _text(tokenizer: Tokenizer, made: Decoded, until: tuple[str, ...]) -> str:
    """The new text before the first stop string."""
    whole = tokenizer.decode([token for token in made.tokens if token != tokenizer.end])
    return min((whole.split(stop)[0] for stop in until), key=len, default=whole)
