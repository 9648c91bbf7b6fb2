"""The step loop: rows at different depths share one core step; rows that halt are read out and re-enter together.

The weights are the same at every depth, so a batch need not agree on its depth. One tick is one core step of every
running row, one look of the policy and one host read (which rows halt). Once one row in COMPANY has halted, those are
read out, their next tokens are drawn on the device, embedded, and join the next tick: readout and embedding cost nearly
as much for one row as for several, so that rows which re-enter each by itself would pay with it what they saved (see
perf/NOTES.md). Finished sequences are replaced from the queue. A row's tokens do not depend on whom it waits for.

Shapes: R rows (one a busy slot), D width, V vocabulary, L loops.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from halting_bench.architectures.base import RecurrentModel
from halting_bench.engine.contexts import SlotContext
from halting_bench.engine.kv_cache import EMBED, READOUT, KeysValues
from halting_bench.engine.meter import Meter
from halting_bench.engine.prefill import run_prompts
from halting_bench.engine.requests import Progress, Request
from halting_bench.engine.rounds import decided_steps, finite_rows, start_policy
from halting_bench.engine.tables import Plan, Tables
from halting_bench.errors import UserError
from halting_bench.halting.policy import HaltingPolicy, State, View, take_rows
from halting_bench.records import Outcome

COMPANY = 2
"""One row in so many has to have halted before they go on; so one or two rows never wait."""

CoreStep = Callable[[int, Tensor, Tensor, SlotContext], Tensor]
"""(loop, state [R, D], input [R, D], context at that loop) -> the next state [R, D]."""


class SlotEngine:
    """Serves requests from slots. Use once: `for progress in engine.run(requests)`."""

    def __init__(self, model: RecurrentModel, policy: HaltingPolicy, plan: Plan, meter: Meter, core: CoreStep | None = None):
        """Args: core: runs a core step, by default the model's own (see graphs.py for the other)."""
        self.model, self.policy, self.plan, self.meter = model, policy, plan, meter
        self.core: CoreStep = model.step if core is None else core
        self.tables = Tables(model, plan)
        self.device = self.tables.device
        self.loops = len(model.spec.loops)
        self.tick = 0
        self.rows: list[Progress] = []
        self.entered = self.loop = np.zeros(0, np.int64)  # [R], entered: the tick before a row's first step in its loop
        self.decided = np.zeros(0, np.int64)  # [R], what rows in a later loop decided in the first, see `decided_steps`
        self.halted = np.zeros(0, np.int64)  # [R], the step at which a row that waits left its loop; 0: it is running
        self.fired = self.sound = self.read = np.zeros(0, bool)  # [R] of rows that wait: the rule held; finite; in `logits`
        self.logits = torch.zeros(0, device=self.device)  # [S, V] that the rules of rows that wait have read
        self.places = np.zeros(0, np.int64)  # [R], `positions` on the host
        self.slots = self.positions = self.steps = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.state = self.x = torch.zeros(0, model.spec.width, device=self.device)
        self.memory: State = {}

    def run(self, requests: Iterator[Request]) -> Iterator[Progress]:
        """Yields sequences as they finish."""
        with torch.inference_mode():
            entering, finished = self._serve(list(range(self.plan.slots)), requests)
        yield from finished
        with torch.inference_mode():
            self._start(entering)
        while self.rows:
            with torch.inference_mode():
                finished = self._step(requests)
            yield from finished

    def _serve(self, free: list[int], requests: Iterator[Request]) -> tuple[list[Progress], list[Progress]]:
        """Fills free slots from the queue. Returns sequences with a row to run, and those that ended with their prompt."""
        entering: list[Progress] = []
        finished: list[Progress] = []
        while free:
            admitted = [self.tables.admit(request, slot) for slot, request in zip(free, requests, strict=False)]
            prompts = [p for p in admitted if p.request.prefill]
            if prompts:
                run_prompts(self.model, self.policy, self.tables, prompts, self.meter)
            free = []
            for progress in admitted:
                if self._ended(progress, progress.position - 1) if progress.position else progress.stopped:
                    finished.append(self._finish(progress, progress.position - 1))
                    free.append(progress.slot)
                else:
                    entering.append(progress)
        return entering, finished

    def _ended(self, progress: Progress, position: int) -> bool:
        """Whether a sequence is over once the row at this position was read out."""
        if progress.generates_after(position) and progress.told_to_stop(self.plan.stop):
            progress.stopped = "stop"
            return True
        if progress.ends_after(position):
            progress.stopped = "length"
            return True
        return False

    def _finish(self, progress: Progress, position: int) -> Progress:
        """Collects what a sequence has after its row at this position."""
        last = position if progress.stopped != "nonfinite" else position - 1
        self.tables.collect(progress, last if last >= len(progress.request.tokens) - 1 else None)
        return progress

    def _start(self, entering: list[Progress]) -> None:
        self.rows = entering
        if entering:
            self.slots = self._index(np.array([progress.slot for progress in entering]))
            self.entered, self.loop, self.decided, self.halted, self.places = (
                np.zeros(len(entering), np.int64) for _ in range(5)
            )
            self.fired, self.sound, self.read = (np.zeros(len(entering), bool) for _ in range(3))
            self._enter(np.arange(len(entering)))

    def _step(self, requests: Iterator[Request]) -> list[Progress]:
        """One tick. Returns the sequences that it finished."""
        self.tick += 1
        if self.loops == 1 and not self.halted.any():
            self._advance(0, np.arange(len(self.rows)))
        else:
            present = [np.flatnonzero((self.loop == loop) & (self.halted == 0)) for loop in range(self.loops)]
            for loop, which in enumerate(present):
                if len(which):
                    self._advance(loop, which)
        waiting = self.halted.nonzero()[0]
        if COMPANY * len(waiting) < len(self.rows):
            return []
        at = self.loop[waiting]
        leaving = sorted(row for loop in range(self.loops) for row in self._leave(loop, waiting[at == loop]))
        return self._turn_over(leaving, requests) if leaving else []

    def _advance(self, loop: int, which: np.ndarray) -> None:
        """One core step of some rows."""
        some = None if len(which) == len(self.rows) else self._index(which)
        context = self._context(which, some)
        x, memory = self._take(self.x, some), self.memory if some is None else take_rows(self.memory, some)
        steps = self._take(self.steps, some) + 1
        host_steps = self.tick - self.entered[which]
        with self.meter.stage("core"):
            state = self.core(loop, self._take(self.state, some), x, context.at(loop, steps, int(host_steps[0])))
            self.meter.core_steps += len(which)
        trial: list[Tensor] = []
        with self.meter.stage("signal"):
            decided = self._index(self.decided[which]) if loop else None
            readout = self._readout(loop, state, context, trial)
            view = View(steps, state, readout, self._gate(state), decided=decided)
            verdict, memory = self.policy.step(view, memory)
            self.meter.evaluations += len(which) if loop == 0 or not self.policy.first_loop_only else 0
        self.state, self.steps = self._put(self.state, some, state), self._put(self.steps, some, steps)
        self._remember(some, memory)
        halt, finite = torch.stack((verdict.halt, finite_rows(state))).cpu().numpy()
        out = (halt | ~finite | (host_steps >= self.plan.max_steps)).nonzero()[0]
        if len(out) == 0:
            return
        done = which[out]
        self.halted[done], self.fired[done], self.sound[done] = host_steps[out], halt[out], finite[out]
        self.read[done] = bool(trial)
        if trial:
            if len(self.logits) == 0:
                self.logits = trial[0].new_zeros(self.plan.slots, trial[0].shape[1])
            at = self._index(out)
            self.logits.index_copy_(0, context.slots[at], trial[0][at])

    def _leave(self, loop: int, rows: np.ndarray) -> list[int]:
        """Rows that halted in a loop go on to the next one or are read out. Returns those whose position is done."""
        for row in rows:
            self._note(self.rows[row], loop, int(self.halted[row]), bool(self.fired[row]), bool(self.sound[row]))
        broken, rows = rows[~self.sound[rows]].tolist(), rows[self.sound[rows]]
        if len(rows) == 0:
            return broken
        some = None if len(rows) == len(self.rows) else self._index(rows)
        exits, context = self._take(self.state, some), self._context(rows, some)
        self._freeze(loop, rows, exits, context)
        if loop == 0:
            self.decided[rows] = decided_steps(self.halted[rows], self.fired[rows])
        if loop + 1 < self.loops:
            self._next_loop(loop, rows, self.model.end(loop, exits, context.at(READOUT)))
            return broken
        known = self.read[rows].all()
        self._answer(rows, context, self.logits[context.slots] if known else self._readout(loop, exits, context, [])())
        return broken + rows.tolist()

    def _note(self, progress: Progress, loop: int, step: int, fired: bool, finite: bool) -> None:
        """Records where a row left a loop; the row's outcome is known when it leaves the last."""
        if loop == 0:
            progress.steps.append([0] * self.loops)
        progress.steps[-1][loop] = step
        if not finite:
            progress.outcomes.append(Outcome.NONFINITE)
            self.tables.cache.hide(progress.slot, progress.position)
        elif loop + 1 == self.loops:
            full = all(steps == self.plan.max_steps for steps in progress.steps[-1])
            progress.outcomes.append(Outcome.EXHAUSTED if full else Outcome.HALTED)
        if not finite or loop + 1 == self.loops:
            progress.fired.append(fired)

    def _readout(self, loop: int, state: Tensor, context: SlotContext, kept: list[Tensor]) -> Callable[[], Tensor]:
        """Runs the coda for rows of the last loop, and keeps the logits.

        It writes the rows' own position of the cache, which nobody reads before they leave: so a trial readout leaves no
        trace, and an exit's need not be run again.
        """

        def readout() -> Tensor:
            if loop + 1 < self.loops:
                raise UserError("a rule that reads logits can act in the last loop only: choose a latent signal for this model")
            with self.meter.stage("readout"):
                context.at(READOUT)
                kept.append(self.model.readout(self.model.end(loop, state, context), context))
                self.meter.readouts += len(state)
            return kept[0]

        return readout

    def _gate(self, state: Tensor) -> Callable[[], Tensor] | None:
        return (lambda: self.model.gate(state)) if self.model.spec.has_gate else None

    def _freeze(self, loop: int, rows: np.ndarray, exits: Tensor, context: SlotContext) -> None:
        steps = self.halted[rows]
        exit_kv: KeysValues = {}
        if self.tables.cache.mode.name == "propagate" and (steps < self.plan.max_steps).any():
            exit_kv = self.model.keys_values(loop, exits, context)
        slots = np.array([self.rows[r].slot for r in rows])
        self.tables.cache.freeze(loop, slots, self.places[rows], steps, exit_kv)

    def _next_loop(self, loop: int, rows: np.ndarray, x: Tensor) -> None:
        self.loop[rows] = loop + 1
        self._begin(loop + 1, rows, x)

    def _answer(self, rows: np.ndarray, context: SlotContext, logits: Tensor) -> None:
        drawing = [i for i, r in enumerate(rows) if self.rows[r].generates_after(self.rows[r].position)]
        every = len(drawing) == len(rows)
        which = None if every else self._index(np.array(drawing, np.int64))
        self.tables.answer(context.slots, context.positions, logits, which, [self.rows[rows[i]] for i in drawing])

    def _turn_over(self, leaving: list[int], requests: Iterator[Request]) -> list[Progress]:
        """Rows whose position is done go on to the next one, or give their slot to the next sequence."""
        finished: list[Progress] = []
        over: list[int] = []
        for row in leaving:
            progress = self.rows[row]
            if progress.outcomes[-1] is Outcome.NONFINITE and progress.generates_after(progress.position):
                progress.stopped = "nonfinite"
            if progress.stopped or self._ended(progress, progress.position):
                finished.append(self._finish(progress, progress.position))
                over.append(row)
            progress.position += 1
        if over:
            entering, at_once = self._serve([self.rows[row].slot for row in over], requests)
            finished += at_once
            for row, progress in zip(over, entering, strict=False):
                self.rows[row] = progress
            if gone := over[len(entering) :]:
                leaving = self._drop(gone, leaving)
        if leaving:
            self._enter(np.array(leaving))
        return finished

    def _drop(self, gone: list[int], leaving: list[int]) -> list[int]:
        """Removes rows. Returns the others of `leaving`, renumbered."""
        keep = np.setdiff1d(np.arange(len(self.rows)), gone)
        new = {int(row): i for i, row in enumerate(keep)}
        self.rows = [self.rows[row] for row in keep]
        self.entered, self.loop, self.decided = self.entered[keep], self.loop[keep], self.decided[keep]
        self.halted, self.places = self.halted[keep], self.places[keep]
        self.fired, self.sound, self.read = self.fired[keep], self.sound[keep], self.read[keep]
        index = self._index(keep)
        self.slots, self.positions, self.steps = self.slots[index], self.positions[index], self.steps[index]
        self.state, self.x, self.memory = self.state[index], self.x[index], take_rows(self.memory, index)
        return [new[row] for row in leaving if row in new]

    def _enter(self, rows: np.ndarray) -> None:
        """Embeds the tokens at these rows' positions and starts their first loop."""
        some = None if len(rows) == len(self.rows) else self._index(rows)
        self.places[rows] = [self.rows[r].position for r in rows]
        positions = self._index(self.places[rows])
        self.positions = self._put(self.positions, some, positions)
        slots = self._take(self.slots, some)
        self.loop[rows] = 0
        context = self._context(rows, some)
        with self.meter.stage("embed"):
            x = self.model.embed(self.tables.text[slots, positions], context.at(EMBED))
            self.meter.embeds += len(rows)
        self._begin(0, rows, x)

    def _begin(self, loop: int, rows: np.ndarray, x: Tensor) -> None:
        some = None if len(rows) == len(self.rows) else self._index(rows)
        slots, positions = self._take(self.slots, some), self._take(self.positions, some)
        state = self.model.begin(loop, x, self.tables.start_noise(slots, positions))
        steps = torch.zeros_like(positions)
        own = [self.rows[r].request.threshold for r in rows]
        with self.meter.stage("signal"):
            thresholds = np.array([np.nan if t is None else t for t in own]) if any(t is not None for t in own) else None
            memory = start_policy(self.policy, steps, state, thresholds)
        self.entered[rows], self.halted[rows] = self.tick, 0
        self.x, self.state, self.steps = (
            self._put(old, some, new) for old, new in ((self.x, x), (self.state, state), (self.steps, steps))
        )
        self._remember(some, memory)

    def _remember(self, some: Tensor | None, memory: State) -> None:
        """Puts some rows' policy state in its place. What is not defined at s_0 may be one NaN wide there."""
        if some is None:
            self.memory = memory
            return
        for name, new in memory.items():
            old = self.memory[name]
            self.memory[name] = self._put(old, some, new.expand(len(new), *old.shape[1:]))

    def _context(self, rows: np.ndarray, some: Tensor | None) -> SlotContext:
        """The attention context of some rows; `some` is their index, None when they are all."""
        slots, positions = self._take(self.slots, some), self._take(self.positions, some)
        top = int(self.places[rows].max()) + 1
        single = (self.rows[rows[0]].slot, top - 1) if len(rows) == 1 else None
        return SlotContext(self.tables.cache, slots, positions, top, single=single)

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _take(self, values: Tensor, some: Tensor | None) -> Tensor:
        return values if some is None else values.index_select(0, some)

    def _put(self, values: Tensor, some: Tensor | None, new: Tensor) -> Tensor:
        return new if some is None else values.index_copy(0, some, new)
