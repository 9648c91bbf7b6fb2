"""Answers a suite's questions with a model and a policy that acts: scoring and generation, task by task, counted.

Shapes: D = max_steps times loops, and 1.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
class Cost:
    """What one task's questions of one kind took. Depths are core applications of scored or newly made tokens."""

    questions: int = 0
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [D] tokens by executed depth, all loops
    outcomes: np.ndarray = field(default_factory=lambda: np.zeros(len(Outcome), np.int64))
    never_fired: int = 0
    prompt_tokens: int = 0
    prompt_core_steps: int = 0
    embeds: int = 0
    core_steps: int = 0  # of all rows that ran, prompts included
    readouts: int = 0
    truncated_questions: int = 0
    dropped_tokens: int = 0

    def as_dict(self) -> dict:
        """JSON-able, with the means."""
        tokens = int(self.histogram.sum())
        depth = float(self.histogram @ np.arange(len(self.histogram))) / tokens if tokens else None
        return {
            "questions": self.questions,
            "tokens": tokens,
            "mean_depth": depth,
            "mean_prompt_depth": self.prompt_core_steps / self.prompt_tokens if self.prompt_tokens else None,
            "depth_histogram": {str(step): int(n) for step, n in enumerate(self.histogram) if n},
            "halted": int(self.outcomes[Outcome.HALTED]),
            "exhausted": int(self.outcomes[Outcome.EXHAUSTED]),
            "nonfinite": int(self.outcomes[Outcome.NONFINITE]),
            "never_fired": self.never_fired,
            "embeds": self.embeds,
            "core_steps": self.core_steps,
            "readouts": self.readouts,
            "truncated_questions": self.truncated_questions,
            "dropped_tokens": self.dropped_tokens,
        }


Costs = dict[tuple[str, str], Cost]
"""(task, kind of question) -> what it took."""


def check_model(model: RecurrentModel, tokenizer: Tokenizer) -> None:
    """Raises UserError when a model cannot answer questions about text."""
    if not model.spec.causal:
        raise UserError(f"a {model.spec.family} model is not causal: lm-eval's questions need a model that reads left to right")
    start = tokenizer.encoding().start
    if not 0 <= start < model.spec.vocab_size:
        raise UserError(f"the start token {start} lies outside the model's vocabulary of {model.spec.vocab_size}")


Answers = dict[int, list[Answer]]
"""Index of the question -> one answer a repeat."""


def answer(model: RecurrentModel, tokenizer: Tokenizer, asks: Sequence[Ask], point: Point) -> tuple[Answers, Costs]:
    """Runs every question with the policy acting.

    Returns:
        The answers, and what they took.

    Raises:
        UserError: a question does not fit the model, or a name is unknown.
    """
    check_model(model, tokenizer)
    answers: Answers = {}
    costs: Costs = {}
    for task, kind in dict.fromkeys((ask.task, ask.kind) for ask in asks):
        numbers = [i for i, ask in enumerate(asks) if (ask.task, ask.kind) == (task, kind)]
        some = [asks[i] for i in numbers]
        run = _generate if isinstance(some[0].body, Generation) else _score
        found, costs[task, kind] = run(model, tokenizer, some, point)
        answers |= {numbers[i]: value for i, value in found.items()}
    return answers, costs


def _score(model: RecurrentModel, tokenizer: Tokenizer, asks: list[Ask], point: Point) -> tuple[Answers, Cost]:
    encoded = encode_scoring(asks, tokenizer, point.max_length)
    done = execute(
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
    sums.add(done.sequence, done.loss[None], done.correct[None])
    cost = Cost(
        questions=len(asks),
        histogram=np.bincount(done.exit_step),
        outcomes=np.bincount(done.outcome, minlength=len(Outcome)),
        never_fired=int(done.never_fired.sum()),
        prompt_tokens=sum(len(s.tokens) for s in encoded.sequences) - len(done.exit_step),
        prompt_core_steps=done.core_steps - int(done.exit_step.sum()),
        embeds=done.embeds,
        core_steps=done.core_steps,
        readouts=done.readouts,
        truncated_questions=encoded.truncated_asks,
        dropped_tokens=encoded.dropped_tokens,
    )
    return sums.answers(0), cost


@dataclass(frozen=True)
class _Draft:
    """A generation on its way: which question, which repeat."""

    number: int
    repeat: int
    request: Request


def _generate(model: RecurrentModel, tokenizer: Tokenizer, asks: list[Ask], point: Point) -> tuple[Answers, Cost]:
    cost, meter = Cost(questions=len(asks)), Meter()
    groups: dict[Sampling, list[_Draft]] = {}
    for number, ask in enumerate(asks):
        body = ask.body
        if not isinstance(body, Generation):
            raise TypeError(f"a {ask.kind} question is not generated")
        tokens, dropped = encode_prompt(body, tokenizer, point.max_length)
        cost.truncated_questions += dropped > 0
        cost.dropped_tokens += dropped
        sampling = Sampling(body.temperature, body.top_k, body.top_p, point.seed)
        ends = _stop_check(tokenizer, body.until)
        for repeat in range(1 if sampling.greedy else ask.repeats):
            request = Request(ask.uid(repeat), np.array(tokens, np.int64), body.max_new_tokens, ends=ends)
            groups.setdefault(sampling, []).append(_Draft(number, repeat, request))
    texts: dict[int, dict[int, str]] = {}
    for sampling, drafts in groups.items():
        by_uid = {draft.request.uid: draft for draft in drafts}
        for done in _stream(model, tokenizer, [draft.request for draft in drafts], point, sampling, meter):
            draft = by_uid[done.uid]
            body = asks[draft.number].body
            texts.setdefault(draft.number, {})[draft.repeat] = _cut(_text(tokenizer, done), getattr(body, "until", ()))
            _count(cost, done)
    cost.embeds, cost.core_steps, cost.readouts = meter.embeds, meter.core_steps, meter.readouts
    answers: Answers = {}
    for number, ask in enumerate(asks):
        found = [texts[number][repeat] for repeat in sorted(texts[number])]
        answers[number] = [found[min(repeat, len(found) - 1)] for repeat in range(ask.repeats)]
    return answers, cost


def _stream(
    model: RecurrentModel, tokenizer: Tokenizer, requests: list[Request], point: Point, sampling: Sampling, meter: Meter
) -> Sequence[Decoded]:
    return list(
        stream(
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


def _text(tokenizer: Tokenizer, done: Decoded) -> str:
    return tokenizer.decode([token for token in done.tokens if token != tokenizer.end])


def _cut(text: str, until: tuple[str, ...]) -> str:
    """The text before the first stop string."""
    return min((text.split(stop)[0] for stop in until), key=len, default=text)


def _count(cost: Cost, done: Decoded) -> None:
    size = max(len(cost.histogram), max(done.steps, default=0) + 1)
    padded = np.pad(cost.histogram, (0, size - len(cost.histogram)))
    cost.histogram = padded + np.bincount(np.array(done.steps, np.int64), minlength=size)
    cost.outcomes += np.bincount(np.array(done.outcomes, np.int64), minlength=len(Outcome))
    cost.prompt_tokens += max(len(done.prompt_steps) - 1, 0)  # the last one makes the first new token
    cost.prompt_core_steps += sum(done.prompt_steps[:-1])
