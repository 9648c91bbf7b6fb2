"""Executed scoring of many operating points at once, for models of several loops and for encoders.

With several loops an early exit in one changes what the next one sees, so nothing can be replayed. Operating points are
stacked on the batch instead: everything before the first loop runs once and is shared, and from there each point has its
own rows and its own K/V.

A rule that reads logits looks, in any loop, at `readout(end(loop, s_k))`: the layers after the loop, later loops left out. In
rounds it sees other rows as they are in this round, not as they will be when they have stopped: such points are provisional.

Shapes: G operating points, S sequences, P positions of all sequences one after another, N scored positions, L loops,
R = max_steps.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.noise import initial_noise
from halting_bench.benchmarks.base import NOT_SCORED, Sequence
from halting_bench.engine.contexts import PackedContext
from halting_bench.engine.kv_cache import EMBED, READOUT, KvCache, KvMode
from halting_bench.engine.meter import Meter
from halting_bench.engine.rounds import Rows, decided_steps, finite_rows, run_loop
from halting_bench.errors import UserError
from halting_bench.halting.policy import HaltingPolicy, State, Verdict, View, wide
from halting_bench.halting.signals import SIGNALS, Features
from halting_bench.records import Outcome


@dataclass(frozen=True)
class GivenDepth(HaltingPolicy):
    """Every row stops at a step given as its threshold: uniform depths, and exits drawn at random beforehand."""

    @property
    def needs_logits(self) -> bool:
        return False

    def init(self, view: View) -> State:
        return {"threshold": torch.full_like(wide(view.latent[:, 0]), torch.inf)}

    def step(self, view: View, state: State) -> tuple[Verdict, State]:
        return Verdict(view.step >= state["threshold"], torch.full_like(state["threshold"], torch.nan)), state


@dataclass(frozen=True)
class Stacked:
    """What G points did, and what came of it."""

    document: np.ndarray  # int64 [N]
    position: np.ndarray  # int64 [N]
    steps: np.ndarray  # int64 [G, N, L]
    loss: np.ndarray  # float64 [G, N], nats; NaN where NONFINITE
    correct: np.ndarray  # bool [G, N]
    outcome: np.ndarray  # int8 [G, N], records.Outcome; EXHAUSTED: every loop ran to R
    never_fired: np.ndarray  # bool [G, N], EXHAUSTED and the rule does not hold at R of the last loop either
    core_steps: int  # over all positions and points
    embeds: int

    def points(self, which: np.ndarray, *, never_fired: bool = False) -> "Stacked":
        """Some of the points, int64 [G'], work uncounted; never_fired: those that are EXHAUSTED were watched in vain."""
        found = replace(self, **{name: getattr(self, name)[which] for name in BY_POINT}, core_steps=0, embeds=0)
        return replace(found, never_fired=found.outcome == Outcome.EXHAUSTED) if never_fired else found

    def joined(self, other: "Stacked") -> "Stacked":
        """The points of both, over the same positions."""
        both = {name: np.concatenate((getattr(self, name), getattr(other, name))) for name in BY_POINT}
        return replace(self, **both, core_steps=self.core_steps + other.core_steps, embeds=self.embeds + other.embeds)


BY_POINT = ("steps", "loss", "correct", "outcome", "never_fired")
"""The arrays of Stacked whose first axis is G."""


def scored_positions(sequences: list[Sequence]) -> np.ndarray:
    """Indices of the N scored positions among all P."""
    return np.flatnonzero(np.concatenate([s.targets for s in sequences]) != NOT_SCORED)


@torch.inference_mode()
def execute_stacked(
    model: RecurrentModel,
    sequences: list[Sequence],
    policy: HaltingPolicy,
    thresholds: np.ndarray,
    *,
    max_steps: int,
    seed: int = 0,
    kv_mode: str = "latest",
    batch_rows: int = 8192,
) -> Stacked:
    """Runs every point on every sequence, the policy acting in each loop with that loop's threshold.

    Args:
        model: of any family whose rows can be packed.
        sequences: with at least one token each.
        policy: its thresholds are replaced by those given.
        thresholds: float64 [G, P or 1, L].
        max_steps: cap of core steps a position and loop.
        seed: of the initial states.
        kv_mode: what other positions see of one that exited; any that rounds are exact for.
        batch_rows: rows at once, or one sequence at one point.

    Raises:
        UserError: the kv_mode is not exact by rounds, or the model cannot be packed.
    """
    mode = KvMode.parse(kv_mode).executable()
    if not mode.exact_by_rounds(max_steps):
        raise UserError(f"kv_mode '{kv_mode}' is not exact in rounds: type latest, propagate or absent")
    if model.spec.dense_only:
        raise UserError(f"a {model.spec.family} model mixes positions outside attention: its exits cannot be executed")
    meter, points = Meter(), len(thresholds)
    ends = np.cumsum([len(s.tokens) for s in sequences])
    every = np.broadcast_to(thresholds, (points, int(ends[-1]), len(model.spec.loops)))
    parts, first = [], 0
    while first < len(sequences):
        start = ends[first] - len(sequences[first].tokens)
        last = max(first + 1, int(np.searchsorted(ends, start + batch_rows, side="right")))
        batch = _Batch(model, sequences[first:last], mode, max_steps, seed, meter)
        together = max(1, batch_rows // batch.rows)
        own = every[:, start : ends[last - 1]]
        results = [batch.run(policy, own[g : g + together]) for g in range(0, points, together)]
        parts.append({name: np.concatenate([r[name] for r in results]) for name in results[0]})
        first = last
    found = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    scored = scored_positions(sequences)
    return Stacked(
        document=np.concatenate([np.full(len(s.tokens), s.document) for s in sequences])[scored],
        position=np.concatenate([np.arange(len(s.tokens)) for s in sequences])[scored],
        **{name: value[:, scored] for name, value in found.items()},
        core_steps=meter.core_steps,
        embeds=meter.embeds,
    )


class _Batch:
    """Some sequences, embedded once."""

    def __init__(self, model: RecurrentModel, sequences: list[Sequence], mode: KvMode, max_steps: int, seed: int, meter: Meter):
        self.model, self.sequences, self.mode, self.max_steps, self.meter = model, sequences, mode, max_steps, meter
        self.like = next(model.parameters())
        self.lengths = np.array([len(s.tokens) for s in sequences])
        self.slots = np.repeat(np.arange(len(sequences)), self.lengths)
        self.positions = np.concatenate([np.arange(n) for n in self.lengths])
        self.rows = len(self.slots)
        self.tokens = torch.from_numpy(np.concatenate([s.tokens for s in sequences]).astype(np.int64)).to(self.like.device)
        self.targets = torch.from_numpy(np.concatenate([s.targets for s in sequences]).astype(np.int64)).to(self.like.device)
        self.noise: Tensor | None = None
        if any(loop.random_start for loop in model.spec.loops):
            uids = np.array([s.uid for s in sequences])[self.slots]
            self.noise = initial_noise(seed, uids, self.positions, model.spec.width).to(self.like)
        self.x = model.embed(self.tokens, self._context(self._cache(1), 1).at(EMBED))
        meter.embeds += self.rows

    def _cache(self, copies: int) -> KvCache:
        size = copies * len(self.sequences)
        return KvCache(self.model.spec, size, int(self.lengths.max()), 1, self.mode, self.like)

    def _stacked_slots(self, copies: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots and positions of all rows, point by point."""
        slots = (np.arange(copies)[:, None] * len(self.sequences) + self.slots).ravel()
        return slots, np.tile(self.positions, copies)

    def _lengths(self, copies: int) -> np.ndarray | None:
        return None if self.model.spec.causal else np.tile(self.lengths, copies)

    def _context(self, cache: KvCache, copies: int) -> PackedContext:
        return PackedContext(cache, *self._stacked_slots(copies), lengths=self._lengths(copies))

    def run(self, policy: HaltingPolicy, thresholds: np.ndarray) -> dict[str, np.ndarray]:
        """thresholds: [g, rows, L]. Arrays of all positions, [g, rows] (steps: [g, rows, L])."""
        copies, loops = len(thresholds), len(self.model.spec.loops)
        slots, positions = self._stacked_slots(copies)
        cache = self._cache(copies)
        context = self._context(cache, copies)
        x = self.x.repeat(copies, 1)
        noise = None if self.noise is None else self.noise.repeat(copies, 1)
        steps, fired = np.zeros((len(slots), loops), np.int64), np.zeros(len(slots), bool)
        lost, decided = np.zeros(0, np.int64), None
        for loop in range(loops):
            own = thresholds[:, :, loop].flatten()
            rows = Rows(
                slots, positions, self.tokens, noise, self._lengths(copies), thresholds=own, decided=decided, provisional=True
            )
            state, steps[:, loop], fired, broken = run_loop(
                self.model, policy, cache, rows, loop, x, max_steps=self.max_steps, meter=self.meter
            )
            lost = np.union1d(lost, broken)
            decided = decided_steps(steps[:, 0], fired) if decided is None else decided
            x = self.model.end(loop, state, context.at(READOUT))
        logits = wide(self.model.readout(x, context.at(READOUT)))
        targets = self.targets.repeat(copies)
        loss = -torch.log_softmax(logits, dim=-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
        gone = np.isin(slots, lost)  # one broken position spoils its whole sequence
        exhausted = (steps == self.max_steps).all(axis=1) & ~gone
        outcome = np.where(gone, Outcome.NONFINITE, np.where(exhausted, Outcome.EXHAUSTED, Outcome.HALTED))
        shape = (copies, self.rows)
        return {
            "steps": steps.reshape(*shape, loops),
            "loss": np.where(gone, np.nan, loss.double().cpu().numpy()).reshape(shape),
            "correct": ((logits.argmax(dim=-1) == targets).cpu().numpy() & ~gone).reshape(shape),
            "outcome": outcome.astype(np.int8).reshape(shape),
            "never_fired": (exhausted & ~fired).reshape(shape),
        }


@torch.inference_mode()
def loop_scores(
    model: RecurrentModel,
    sequences: list[Sequence],
    signals: tuple[str, ...],
    *,
    max_steps: int,
    seed: int = 0,
    batch_rows: int = 8192,
) -> dict[str, np.ndarray]:
    """Every signal at every step of every loop, nothing stopping: what thresholds are chosen from.

    Returns:
        signal -> float32 (float64 when the model is) [P, L, R].
    """
    ends = np.cumsum([len(s.tokens) for s in sequences])
    part = (ends - 1) // batch_rows
    parts = []
    for number in np.unique(part):
        some = [sequences[i] for i in np.flatnonzero(part == number)]
        batch = _Batch(model, some, KvMode.parse("latest"), max_steps, seed, Meter())
        parts.append(_scores(model, batch, signals, max_steps))
    return {name: np.concatenate([found[name] for found in parts]) for name in signals}


def _scores(model: RecurrentModel, batch: _Batch, signals: tuple[str, ...], max_steps: int) -> dict[str, np.ndarray]:
    """Scores of a batch by signal, [rows, L, R] each."""
    loops = len(model.spec.loops)
    real = np.float64 if batch.x.dtype == torch.float64 else np.float32
    found = {name: np.full((batch.rows, loops, max_steps), np.nan, real) for name in signals}
    names = tuple(sorted({name for signal in signals for name in SIGNALS[signal].remembers}))
    context = batch._context(batch._cache(1), 1)
    sequence = None if model.spec.causal else torch.from_numpy(batch.slots).to(batch.x.device)
    x = batch.x
    for loop in range(loops):
        state = model.begin(loop, x, batch.noise)

        def view(k: int, state: Tensor, loop: int = loop) -> View:
            def readout() -> Tensor:
                return model.readout(model.end(loop, state, context.at(READOUT)), context)

            step = torch.full((len(state),), k, device=state.device)
            gate = (lambda: model.gate(state)) if model.spec.has_gate else None
            return View(step, state, readout, gate, sequence=sequence)

        memory = Features(view(0, state), None).remember(names)
        for k in range(1, max_steps + 1):
            state = model.step(loop, state, x, context.at(loop, k))
            features = Features(view(k, state), memory)
            for name in signals:
                found[name][:, loop, k - 1] = SIGNALS[name].score(features).cpu().numpy()
            memory = features.remember(names)
        if not finite_rows(state).all():
            break  # what follows means nothing; NaN says so
        x = model.end(loop, state, context.at(READOUT))
    return found
