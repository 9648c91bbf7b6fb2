"""Executed scoring: the policy acts on a given text, and what it skips is not run.

Rules that look at latents only run in rounds over packed rows; rules that read logits, and K/V modes in which a later
step overwrites an earlier one, need every earlier token's decision first and are stepped token by token with the text
forced. Both give what decoding that text would give.

Shapes: N scored positions in the order of the sequences, L loops, R = max_steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.noise import initial_noise
from halting_bench.benchmarks.base import NOT_SCORED, Sequence
from halting_bench.engine.contexts import PackedContext
from halting_bench.engine.decode import GREEDY, serve
from halting_bench.engine.kv_cache import READOUT, KvCache, KvMode
from halting_bench.engine.memory import halve, is_out_of_memory
from halting_bench.engine.meter import Meter
from halting_bench.engine.prefill import READOUT_ELEMENTS, check_length, check_prefill, prompt_policy, runs_as_prompt
from halting_bench.engine.requests import Request
from halting_bench.engine.rounds import Rows, run_rounds
from halting_bench.engine.tables import Plan
from halting_bench.halting.policy import HaltingPolicy, wide
from halting_bench.records import Outcome


@dataclass(frozen=True)
class Executed:
    """What a policy did and what came of it, one entry a scored position. Counts are over all positions that ran."""

    sequence: np.ndarray  # int64 [N], uid
    document: np.ndarray  # int64 [N]
    position: np.ndarray  # int64 [N]
    exit_step: np.ndarray  # int64 [N], core applications in all loops; of a NONFINITE row, those until it broke
    exit_per_loop: np.ndarray  # int64 [N, L]
    outcome: np.ndarray  # int8 [N], records.Outcome
    loss: np.ndarray  # float64 [N], nats of the target; NaN where NONFINITE
    correct: np.ndarray  # bool [N], the target is the argmax
    never_fired: np.ndarray  # bool [N], EXHAUSTED and not even firing at R
    embeds: int
    core_steps: int
    readouts: int
    evaluations: int  # rows times steps at which a policy looked
    halvings: int = 0  # times that the rows did not fit into memory
    seconds: dict[str, float] | None = field(default=None)  # by stage, when a clock was given


@dataclass
class _Answers:
    """Of one sequence, every position."""

    steps: np.ndarray  # [T, L]
    outcome: np.ndarray
    fired: np.ndarray
    loss: np.ndarray
    correct: np.ndarray


def execute(
    model: RecurrentModel,
    sequences: list[Sequence],
    policy: HaltingPolicy,
    *,
    max_steps: int,
    kv_mode: str = "latest",
    prefill: str = "adaptive",
    seed: int = 0,
    batch_rows: int = 4096,
    thresholds: np.ndarray | None = None,
    clock: Callable[[], float] | None = None,
) -> Executed:
    """Scores sequences with the policy acting.

    Args:
        model: any family; rules that read logits need a causal one.
        sequences: with at least one token each.
        policy: decides at every position how many core steps it gets.
        max_steps: cap of core steps a position and loop.
        kv_mode: what later positions see of one that exited early (see KvMode).
        prefill: for the positions up to and including the first scored one, when it is not the very first: adaptive
            (no different from the others), full or shared (see prefill.PREFILLS).
        seed: of the initial states.
        batch_rows: positions at once, or one sequence. Out of memory halves it.
        thresholds: float64 [S], points of the policy side by side: the same sequence may come once a threshold.
        clock: times the stages when given. On a GPU it must wait for the device.

    Raises:
        UserError: a sequence is empty or too long, a name is unknown, or the model cannot run this policy.
    """
    scorer = _Scorer(model, policy, max_steps, KvMode.parse(kv_mode).executable(), check_prefill(prefill), seed, Meter(clock))
    for sequence in sequences:
        check_length(len(sequence.tokens), 0, model)
    if thresholds is not None and len(thresholds) != len(sequences):
        raise ValueError(f"{len(sequences)} sequences need as many thresholds, not {len(thresholds)}")
    answers: list[_Answers] = []
    while len(answers) < len(sequences):
        batch = _next_batch(sequences[len(answers) :], batch_rows)
        own = None if thresholds is None else thresholds[len(answers) :][: len(batch)]
        try:
            with torch.inference_mode():
                answers += scorer.run(batch, own)
            continue
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(batch) == 1:
                raise
        batch_rows = halve(sum(len(s.tokens) for s in batch), "rows")
        scorer.meter.halvings += 1
    scorer.meter.stop()
    return _collect(sequences, answers, scorer.meter, len(model.spec.loops))


def _next_batch(sequences: list[Sequence], rows: int) -> list[Sequence]:
    ends = np.cumsum([len(s.tokens) for s in sequences])
    return sequences[: max(1, int(np.searchsorted(ends, rows, side="right")))]


def prompt_length(sequence: Sequence) -> int:
    """Leading positions that are the prompt: those that decoding the rest would prefill."""
    scored = np.flatnonzero(sequence.targets != NOT_SCORED)
    first = int(scored[0]) if len(scored) else len(sequence.tokens) - 1
    return first + 1 if first else 0


@dataclass
class _Scorer:
    model: RecurrentModel
    policy: HaltingPolicy
    max_steps: int
    mode: KvMode
    prefill: str
    seed: int
    meter: Meter

    def run(self, batch: list[Sequence], own: np.ndarray | None) -> list[_Answers]:
        """own: float64, the sequences' thresholds; None: the policy's."""
        if self.policy.needs_logits or not self.mode.exact_by_rounds(self.max_steps):
            return self._forced(batch, own)
        answers, broken = self._rounds(batch, own)
        if broken:
            if not self.model.spec.causal:  # every position sees the broken one: the sequence is lost
                return [self._lost(s) if i in broken else a for i, (s, a) in enumerate(zip(batch, answers, strict=True))]
            again = self._forced([batch[i] for i in broken], None if own is None else own[broken])
            mended = dict(zip(broken, again, strict=True))
            answers = [mended.get(i, answer) for i, answer in enumerate(answers)]
        return answers

    def _rounds(self, batch: list[Sequence], own: np.ndarray | None) -> tuple[list[_Answers], list[int]]:
        """Answers of all, and which of them mean nothing because a state broke."""
        lengths = np.array([len(s.tokens) for s in batch])
        prompts = np.array([0 if self.prefill == "adaptive" else prompt_length(s) for s in batch])
        like = next(self.model.parameters())
        planes = self.max_steps if prompts.any() else 1  # frozen rows of this pass need no history, those of another do
        cache = KvCache(self.model.spec, len(batch), int(lengths.max()), planes, self.mode, like)
        slots = np.repeat(np.arange(len(batch)), lengths)
        positions = np.concatenate([np.arange(n) for n in lengths])
        in_prompt = positions < prompts[slots]
        groups = [np.flatnonzero(in_prompt & (slots == s)) for s in np.flatnonzero(prompts)] if self.prefill == "shared" else []
        if self.prefill == "full" and in_prompt.any():
            groups = [np.flatnonzero(in_prompt)]
        state = torch.zeros(len(slots), self.model.spec.width, dtype=like.dtype, device=like.device)
        steps, fired = np.zeros((len(slots), len(self.model.spec.loops)), np.int64), np.zeros(len(slots), bool)
        broken: set[int] = set()
        decide = prompt_policy(self.prefill, self.policy, self.model, self.max_steps)
        passes = [(group, decide, self.prefill == "shared") for group in groups]
        passes.append((np.flatnonzero(~in_prompt), self.policy, False))
        for chosen, policy, shared in passes:
            chosen = chosen[~np.isin(slots[chosen], list(broken))]
            if len(chosen) == 0:
                continue
            rows = self._rows(batch, slots[chosen], positions[chosen], lengths, like, shared)
            if own is not None and policy is self.policy:
                rows.thresholds = own[slots[chosen]]
            exits = run_rounds(self.model, policy, cache, rows, max_steps=self.max_steps, meter=self.meter)
            state[torch.from_numpy(chosen).to(like.device)] = exits.state
            steps[chosen], fired[chosen] = exits.steps, exits.fired
            broken |= set(exits.broken.tolist())
        return self._read_out(batch, cache, state, steps, fired, slots, positions, lengths), sorted(broken)

    def _rows(
        self,
        batch: list[Sequence],
        slots: np.ndarray,
        positions: np.ndarray,
        lengths: np.ndarray,
        like: torch.Tensor,
        shared: bool,
    ) -> Rows:
        tokens = np.concatenate([s.tokens[positions[slots == i]] for i, s in enumerate(batch)]).astype(np.int64)
        noise = None
        if any(loop.random_start for loop in self.model.spec.loops):
            uids = np.array([s.uid for s in batch])[slots]
            noise = initial_noise(self.seed, uids, positions, self.model.spec.width).to(like)
        causal = self.model.spec.causal
        return Rows(slots, positions, torch.from_numpy(tokens).to(like.device), noise, None if causal else lengths, shared)

    def _read_out(
        self,
        batch: list[Sequence],
        cache: KvCache,
        state: torch.Tensor,
        steps: np.ndarray,
        fired: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
        lengths: np.ndarray,
    ) -> list[_Answers]:
        """One pass of the coda over the exit states."""
        ends = np.cumsum(lengths)
        outcome = np.where((steps == self.max_steps).all(axis=1), Outcome.EXHAUSTED, Outcome.HALTED).astype(np.int8)
        per_pass = max(1, READOUT_ELEMENTS // (self.model.spec.vocab_size * int(lengths.max())))
        answers = []
        for first in range(0, len(batch), per_pass):
            some = slice(ends[first] - lengths[first], ends[min(first + per_pass, len(batch)) - 1])
            causal = self.model.spec.causal
            context = PackedContext(cache, slots[some], positions[some], lengths=None if causal else lengths)
            with self.meter.stage("readout"):
                logits = self.model.readout(state[some], context.at(READOUT))
                self.meter.readouts += len(logits)
            targets = torch.from_numpy(np.concatenate([s.targets for s in batch[first : first + per_pass]])).to(logits.device)
            log_p = torch.log_softmax(wide(logits), dim=-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
            loss, correct = -log_p.double().cpu().numpy(), (wide(logits).argmax(dim=-1) == targets).cpu().numpy()
            for i in range(first, min(first + per_pass, len(batch))):
                whole = slice(ends[i] - lengths[i], ends[i])
                own = slice(whole.start - some.start, whole.stop - some.start)
                answers.append(_Answers(steps[whole], outcome[whole], fired[whole], loss[own], correct[own]))
        return answers

    def _forced(self, batch: list[Sequence], own: np.ndarray | None) -> list[_Answers]:
        """Token by token, the sequences side by side."""
        plan = Plan(
            slots=len(batch),
            length=max(len(s.tokens) for s in batch),
            max_steps=self.max_steps,
            mode=self.mode,
            prefill=self.prefill,
            seed=self.seed,
            sampling=GREEDY,
            stop=frozenset(),
            scoring=True,
        )
        as_prompt = self.prefill != "adaptive" and runs_as_prompt(self.policy, plan)
        thresholds = [None] * len(batch) if own is None else own.tolist()
        requests = [
            Request(s.uid, s.tokens, 0, s.targets, prompt_length(s) if as_prompt else 0, threshold)
            for s, threshold in zip(batch, thresholds, strict=True)
        ]
        done = {p.request.key: p for p in serve(self.model, self.policy, plan, iter(requests), self.meter)}
        answers = []
        for sequence, request in zip(batch, requests, strict=True):
            progress, ran = done[request.key], len(done[request.key].outcomes)
            answer = self._lost(sequence)
            answer.steps[:ran], answer.outcome[:ran], answer.fired[:ran] = progress.steps, progress.outcomes, progress.fired
            if progress.loss is None or progress.correct is None:
                raise RuntimeError("a scoring run kept no answers")
            answers.append(_Answers(answer.steps, answer.outcome, answer.fired, progress.loss, progress.correct))
        return answers

    def _lost(self, sequence: Sequence) -> _Answers:
        """Of a sequence of which no position was read out."""
        length = len(sequence.tokens)
        return _Answers(
            steps=np.zeros((length, len(self.model.spec.loops)), np.int64),
            outcome=np.full(length, Outcome.NONFINITE, np.int8),
            fired=np.zeros(length, bool),
            loss=np.full(length, np.nan),
            correct=np.zeros(length, bool),
        )


def _collect(sequences: list[Sequence], answers: list[_Answers], meter: Meter, loops: int) -> Executed:
    scored = [np.flatnonzero(s.targets != NOT_SCORED) for s in sequences]

    def join(parts: list[np.ndarray], empty: tuple[int, ...], dtype: type) -> np.ndarray:
        return np.concatenate(parts).astype(dtype) if parts else np.empty(empty, dtype)

    def each(name: str, dtype: type) -> np.ndarray:
        return join([getattr(a, name)[p] for a, p in zip(answers, scored, strict=True)], (0,), dtype)

    steps = join([a.steps[p] for a, p in zip(answers, scored, strict=True)], (0, loops), np.int64)
    outcome = each("outcome", np.int8)
    return Executed(
        sequence=join([np.full(len(p), s.uid) for s, p in zip(sequences, scored, strict=True)], (0,), np.int64),
        document=join([np.full(len(p), s.document) for s, p in zip(sequences, scored, strict=True)], (0,), np.int64),
        position=join(list(scored), (0,), np.int64),
        exit_step=steps.sum(axis=1),
        exit_per_loop=steps,
        outcome=outcome,
        loss=each("loss", np.float64),
        correct=each("correct", bool),
        never_fired=(outcome == Outcome.EXHAUSTED) & ~each("fired", bool),
        embeds=meter.embeds,
        core_steps=meter.core_steps,
        readouts=meter.readouts,
        evaluations=meter.evaluations,
        halvings=meter.halvings,
        seconds=dict(meter.seconds) if meter.clock else None,
    )
