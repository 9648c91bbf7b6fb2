"""Rounds: step k runs, packed, the rows that are still active at k. For rules that look at latents only.

Because a frozen position shows the same K/V to every later step, running all positions of a text side by side gives
what decoding it token by token would give, without the tokens' waiting for each other.

Shapes: N rows (positions of slots, sorted by slot, then position), D width, L loops.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from halting_bench.architectures.base import RecurrentModel
from halting_bench.engine.contexts import PackedContext
from halting_bench.engine.kv_cache import EMBED, READOUT, KeysValues, KvCache
from halting_bench.engine.meter import Meter
from halting_bench.errors import UserError
from halting_bench.halting.policy import HaltingPolicy, State, View, take_rows, undefined_readout, wide


@dataclass
class Rows:
    """What to run. noise: [N, D] or None; `shared`: the rows are one prompt that stops as one."""

    slots: np.ndarray
    positions: np.ndarray
    tokens: Tensor
    noise: Tensor | None
    lengths: np.ndarray | None = None  # of each slot's sequence, when the model is not causal
    shared: bool = False
    thresholds: np.ndarray | None = None  # [N], the rows' own operating points instead of the policy's
    decided: np.ndarray | None = None  # int64 [N], see `decided_steps`; None in the first loop
    provisional: bool = False  # rules may read logits: of what other rows show in this round, not of what they will commit


@dataclass
class Exits:
    """Where rows stopped. Rows of a broken slot (some state in it turned non-finite) mean nothing."""

    state: Tensor  # [N, D], the input of `readout`
    steps: np.ndarray  # int64 [N, L]
    fired: np.ndarray  # bool [N], whether the rule held at the row's last step (of the last loop)
    broken: np.ndarray  # slots


def finite_rows(state: Tensor) -> Tensor:
    """[R] bool: the norm is a finite number."""
    return torch.linalg.vector_norm(wide(state), dim=-1) < torch.inf


def decided_steps(steps: np.ndarray, fired: np.ndarray) -> np.ndarray:
    """What later loops are told of the first (View.decided): [N] the step of a row that fired, else one that never comes."""
    return np.where(fired, steps, np.iinfo(np.int64).max)


def run_rounds(
    model: RecurrentModel, policy: HaltingPolicy, cache: KvCache, rows: Rows, *, max_steps: int, meter: Meter
) -> Exits:
    """Runs every row from its token to the state it exits with; the cache then holds their K/V of prelude and core."""
    count, loops = len(rows.slots), len(model.spec.loops)
    steps, fired = np.zeros((count, loops), np.int64), np.zeros(count, bool)
    broken = np.zeros(0, np.int64)
    context = PackedContext(cache, rows.slots, rows.positions, lengths=rows.lengths)
    with meter.stage("embed"):
        x = model.embed(rows.tokens, context.at(EMBED))
        meter.embeds += count
    for loop in range(loops):
        state, steps[:, loop], fired, newly = run_loop(model, policy, cache, rows, loop, x, max_steps=max_steps, meter=meter)
        broken = np.union1d(broken, newly)
        if loop == 0:
            rows = replace(rows, decided=decided_steps(steps[:, 0], fired))
        x = model.end(loop, state, context.at(READOUT))
    return Exits(x, steps, fired, broken)


def run_loop(
    model: RecurrentModel,
    policy: HaltingPolicy,
    cache: KvCache,
    rows: Rows,
    loop: int,
    x: Tensor,
    *,
    max_steps: int,
    meter: Meter,
) -> tuple[Tensor, np.ndarray, np.ndarray, np.ndarray]:
    """One loop alone, from its input x [N, D]. Returns exit states [N, D], steps [N], where the rule fired, broken slots."""
    return _Loop(model, policy, cache, rows, loop, max_steps, meter).run(x)


class _Loop:
    """One loop of one set of rows."""

    def __init__(
        self, model: RecurrentModel, policy: HaltingPolicy, cache: KvCache, rows: Rows, loop: int, max_steps: int, meter: Meter
    ):
        self.model, self.policy, self.cache, self.rows, self.loop = model, policy, cache, rows, loop
        self.max_steps, self.meter = max_steps, meter

    def run(self, x: Tensor) -> tuple[Tensor, np.ndarray, np.ndarray, np.ndarray]:
        """x: [N, D]. Returns exit states [N, D], steps [N], whether the rule fired [N], and broken slots."""
        rows, count = self.rows, len(x)
        steps, fired, broken = np.zeros(count, np.int64), np.zeros(count, bool), np.zeros(0, np.int64)
        state = self.model.begin(self.loop, x, rows.noise)
        exits = torch.zeros_like(state)
        active = np.arange(count)
        context = self._context(active)
        step = torch.zeros(count, dtype=torch.int64, device=x.device)
        with self.meter.stage("signal"):
            memory = start_policy(self.policy, step, state, rows.thresholds)
        for k in range(1, self.max_steps + 1):
            with self.meter.stage("core"):
                state = self.model.step(self.loop, state, x, context.at(self.loop, k))
                self.meter.core_steps += len(active)
            step = step + 1
            with self.meter.stage("signal"):
                verdict, memory = self.policy.step(self._view(step, state, context, active), memory)
                self.meter.evaluations += len(active) if self.loop == 0 or not self.policy.first_loop_only else 0
            halt, finite = torch.stack((verdict.halt, finite_rows(state))).cpu().numpy()
            if rows.shared:
                halt[:] = halt.all()
            if not finite.all():
                broken = np.union1d(broken, rows.slots[active[~finite]])
            leave = halt | np.isin(rows.slots[active], broken) | (k == self.max_steps)
            if not leave.any():
                continue
            leaving = active[leave]
            steps[leaving], fired[leaving] = k, halt[leave]
            exits[self._index(leaving)] = state[self._index(leave)]
            self._freeze(leaving, k, exits)
            if leave.all():
                break
            keep = self._index(np.flatnonzero(~leave))
            active = active[~leave]
            state, x, step, memory = state[keep], x[keep], step[keep], take_rows(memory, keep)
            context = self._context(active)
        return exits, steps, fired, broken

    def _view(self, step: Tensor, state: Tensor, context: PackedContext, active: np.ndarray) -> View:
        def readout() -> Tensor:
            whole_prompt = self.rows.shared and self.loop + 1 == len(self.model.spec.loops)
            if not whole_prompt and not self.rows.provisional:
                raise LookupError(f"{type(self.policy).__name__} asked for logits in rounds: its needs_logits must be True")
            with self.meter.stage("readout"):
                self.meter.readouts += len(state)
                return self.model.readout(self.model.end(self.loop, state, context.at(READOUT)), context)

        gate = (lambda: self.model.gate(state)) if self.model.spec.has_gate else None
        decided = None if self.rows.decided is None else self._index(self.rows.decided[active])
        sequence = None if self.model.spec.causal else self._index(self.rows.slots[active])
        return View(step, state, readout, gate, self.rows.shared, decided, sequence)

    def _freeze(self, leaving: np.ndarray, k: int, exits: Tensor) -> None:
        slots, positions = self.rows.slots[leaving], self.rows.positions[leaving]
        exit_kv: KeysValues = {}
        if self.cache.mode.name == "propagate" and k < self.max_steps:
            exit_kv = self.model.keys_values(self.loop, exits[self._index(leaving)], self._context(leaving))
        self.cache.freeze(self.loop, slots, positions, np.full(len(leaving), k), exit_kv)

    def _context(self, active: np.ndarray) -> PackedContext:
        return PackedContext(self.cache, self.rows.slots[active], self.rows.positions[active], lengths=self.rows.lengths)

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.cache.device)


def start_policy(policy: HaltingPolicy, step: Tensor, state: Tensor, thresholds: np.ndarray | None) -> State:
    """The policy's state at s_0. thresholds: [R], NaN for the policy's own. Raises UserError when it has none to replace."""
    memory = policy.init(View(step, state, undefined_readout))
    if thresholds is not None:
        if "threshold" not in memory:
            raise UserError(f"a {type(policy).__name__} has no threshold to set per sequence: leave `thresholds` out")
        own = torch.from_numpy(thresholds).to(memory["threshold"])
        memory["threshold"] = torch.where(own.isnan(), memory["threshold"], own)
    return memory
