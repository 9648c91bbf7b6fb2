"""The slow, obvious runtime: token by token, one mask over the K/V of every step of every token, in every kv_mode.

What a token at step k sees of an earlier token that exited at n is one function, `shown_step`. Nothing is packed,
filled, shared or skipped here; the fast runtime is tested against it. Never timed.

Shapes: r rows (one token, or the positions of a prompt that stops as one), D width, V vocabulary, L loops.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.noise import initial_noise
from halting_bench.engine.kv_cache import EMBED, READOUT, KvMode
from halting_bench.engine.rounds import finite_rows
from halting_bench.halting.policy import HaltingPolicy, View, undefined_readout
from halting_bench.records import Outcome

PROJECTED = 0
"""The step number under which the projections of an exit state are filed."""

Table = dict[tuple[int, int, int, int], tuple[Tensor, Tensor]]
"""(stage, layer, position, step) -> k, v [G, E]."""


def shown_step(mode: KvMode, step: int, exited: int) -> int | None:
    """Which step's core K/V of a token that exited at `exited` a later token sees at `step`; None: nothing."""
    if mode.name in ("full", "rerun") or (step <= exited and mode.name in ("latest", "propagate", "absent")):
        return step
    if mode.name == "modulo":
        same_slot = [j for j in range(1, exited + 1) if (j - step) % mode.ring == 0]
        return same_slot[-1] if same_slot else exited
    return {"latest": exited, "last-only": exited, "propagate": PROJECTED, "absent": None}[mode.name]


class _Masked(AttentionContext):
    """Rows that run together at one step. They see each other at that step, and earlier tokens as `shown` says."""

    def __init__(self, positions: list[int], table: Table, shown: Callable[[int, int, int], int | None]):
        self.rows, self.table, self.shown = positions, table, shown
        self.positions = torch.tensor(positions)
        self.stage, self.step = EMBED, 0

    def at(self, stage: int, step: int) -> "_Masked":
        self.stage, self.step = stage, step
        return self

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for row, position in enumerate(self.rows):
            self.table[self.stage, layer, position, self.step] = k[row], v[row]
        entries = [key for key in self.table if key[:2] == (self.stage, layer)]
        keys, values = (torch.stack([self.table[key][i] for key in entries]) for i in (0, 1))
        seen = torch.tensor([[self._sees(row, position, step) for _, _, position, step in entries] for row in self.rows])
        repeat = q.shape[1] // k.shape[1]
        keys, values = keys.repeat_interleave(repeat, dim=1), values.repeat_interleave(repeat, dim=1)
        scores = torch.einsum("rhe,nhe->rhn", q, keys) / q.shape[-1] ** 0.5
        return torch.einsum("rhn,nhe->rhe", scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1), values)

    def _sees(self, row: int, position: int, step: int) -> bool:
        if position > row:
            return False
        return step == (self.step if position in self.rows else self.shown(self.stage, position, self.step))


@dataclass(frozen=True)
class Row:
    """One token's decision and readout."""

    steps: list[int]  # [L]
    outcome: Outcome
    fired: bool
    logits: Tensor | None  # [V]; None where the state broke


class MaskedReference:
    """One sequence, fed token by token."""

    def __init__(
        self,
        model: RecurrentModel,
        policy: HaltingPolicy,
        *,
        max_steps: int,
        kv_mode: str = "latest",
        seed: int = 0,
        uid: int = 0,
    ):
        self.model, self.policy, self.max_steps = model, policy, max_steps
        self.mode, self.seed, self.uid = KvMode.parse(kv_mode), seed, uid
        self.table: Table = {}
        self.exits: dict[tuple[int, int], int] = {}  # (loop, position) -> n
        self.length = 0

    @torch.inference_mode()
    def feed(self, tokens: list[int], *, shared: bool = False, policy: HaltingPolicy | None = None) -> list[Row]:
        """Runs tokens one after the other, or together as a prompt with one exit.

        Args:
            tokens: at least one.
            shared: together.
            policy: for these tokens, instead of the sequence's own.
        """
        if not shared:
            return [self._run([token], policy or self.policy, False)[0] for token in tokens]
        return self._run(tokens, policy or self.policy, True)

    def _shown(self, stage: int, position: int, step: int) -> int | None:
        if stage >= 0:
            exited = self.exits.get((stage, position))
            return None if exited is None else shown_step(self.mode, step, exited)
        return step if stage == READOUT and self.mode.name == "full" else 0  # 0: what was committed

    def _run(self, tokens: list[int], policy: HaltingPolicy, shared: bool) -> list[Row]:
        positions = list(range(self.length, self.length + len(tokens)))
        self.length += len(tokens)
        context = _Masked(positions, self.table, self._shown)
        x = self.model.embed(torch.tensor(tokens), context.at(EMBED, 0))
        depths: list[int] = []
        fired, halted_early = False, False
        decided: int | None = None
        for loop in range(len(self.model.spec.loops)):
            state, step, fired = self._loop(loop, x, policy, context, shared, decided)
            depths.append(step)
            decided = (step if fired else self.max_steps + 1) if decided is None else decided
            if not finite_rows(state).all():
                for key in [key for key in self.table if key[2] in positions]:
                    del self.table[key]
                return [Row(depths, Outcome.NONFINITE, fired, None) for _ in tokens]
            halted_early |= step < self.max_steps
            x = self.model.end(loop, state, context.at(READOUT, 0))
        committed = depths[-1] if self.mode.name == "full" else 0
        logits = self.model.readout(x, context.at(READOUT, committed))
        outcome = Outcome.HALTED if halted_early else Outcome.EXHAUSTED
        return [Row(depths, outcome, fired, logits[i]) for i in range(len(tokens))]

    def _loop(
        self, loop: int, x: Tensor, policy: HaltingPolicy, context: _Masked, shared: bool, decided: int | None
    ) -> tuple[Tensor, int, bool]:
        """Exit states [r, D], their step, and whether the rule fired there."""
        noise = None
        if any(spec.random_start for spec in self.model.spec.loops):
            noise = initial_noise(self.seed, np.asarray(self.uid), np.array(context.rows), self.model.spec.width)
        state = self.model.begin(loop, x, noise)
        memory = policy.init(View(torch.zeros(len(x), dtype=torch.int64), state, undefined_readout))
        exited, exit_state, fired = 0, state, False
        for k in range(1, self.max_steps + 1):
            frozen = exited > 0 and self.mode.name != "full"
            state = self.model.step(loop, exit_state if frozen else state, x, context.at(loop, k))
            if not exited:
                told = None if decided is None else torch.full((len(x),), decided)
                readout = self._trial(loop, state, context, k)
                view = View(torch.full((len(x),), k), state, readout, self._gate(state), shared, told)
                verdict, memory = policy.step(view, memory)
                fired = bool(verdict.halt.all())
                if fired or not finite_rows(state).all() or k == self.max_steps:
                    exited, exit_state = k, state
                    self.exits.update({(loop, position): k for position in context.rows})
                    if self.mode.name not in ("full", "rerun"):
                        break
            if self.mode.name == "full":
                self._trial(loop, state, context, k)()
        if self.mode.name == "propagate":
            for layer, (k_, v_) in self.model.keys_values(loop, exit_state, context).items():
                self.table.update({(loop, layer, p, PROJECTED): (k_[i], v_[i]) for i, p in enumerate(context.rows)})
        return exit_state, exited, fired

    def _trial(self, loop: int, state: Tensor, context: _Masked, step: int) -> Callable[[], Tensor]:
        def readout() -> Tensor:
            kept = dict(self.table)
            label = step if self.mode.name == "full" else 0
            logits = self.model.readout(self.model.end(loop, state, context.at(READOUT, label)), context)
            if self.mode.name != "full":
                self.table.clear()
                self.table.update(kept)
            return logits

        return readout

    def _gate(self, state: Tensor) -> Callable[[], Tensor] | None:
        return (lambda: self.model.gate(state)) if self.model.spec.has_gate else None
