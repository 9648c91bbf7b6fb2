"""Prompts of several slots, run side by side in rounds and committed by one pass of the coda.

Shapes: N rows (prompt positions of all the slots), V vocabulary.
"""

import numpy as np
import torch

from halting_bench.architectures.base import RecurrentModel
from halting_bench.engine.contexts import PackedContext
from halting_bench.engine.kv_cache import READOUT
from halting_bench.engine.meter import Meter
from halting_bench.engine.requests import Progress
from halting_bench.engine.rounds import Exits, Rows, run_rounds
from halting_bench.engine.tables import Plan, Tables
from halting_bench.errors import UserError, unknown_name
from halting_bench.halting.policies import FixedDepth
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.records import Outcome

PREFILLS = ("adaptive", "full", "shared")
"""Every prompt position stops for itself; all run to the trained depth; all stop as one, with one verdict."""

READOUT_ELEMENTS = 1 << 26
"""Logits held at once, at most (or those of one sequence)."""


def check_prefill(prefill: str) -> str:
    """Itself. Raises UserError unless it is one of PREFILLS."""
    if prefill not in PREFILLS:
        raise unknown_name("prefill", prefill, PREFILLS)
    return prefill


def prompt_policy(prefill: str, policy: HaltingPolicy, model: RecurrentModel, max_steps: int) -> HaltingPolicy:
    """What decides over prompt positions: the trained depth (or the cap, when that is less) in `full`, else the policy."""
    return FixedDepth(min(model.spec.mean_recurrence, max_steps)) if prefill == "full" else policy


def runs_as_prompt(policy: HaltingPolicy, plan: Plan) -> bool:
    """Whether a prompt may run in rounds: its positions share a depth, or rounds are exact for this policy and kv_mode."""
    return plan.prefill != "adaptive" or (not policy.needs_logits and plan.mode.exact_by_rounds(plan.max_steps))


def outcomes_of(steps: np.ndarray, max_steps: int) -> list[Outcome]:
    """steps: int64 [N, L]. A row is EXHAUSTED when every loop ran to the cap."""
    return [Outcome.EXHAUSTED if full else Outcome.HALTED for full in (steps == max_steps).all(axis=1)]


def run_prompts(model: RecurrentModel, policy: HaltingPolicy, tables: Tables, progresses: list[Progress], meter: Meter) -> None:
    """Runs each sequence's leading `request.prefill` tokens, and leaves its first new token where position P reads it.

    A prompt whose state breaks is stepped token by token instead, where only the broken token is lost; one that has a
    single depth ends its sequence.
    """
    plan = tables.plan
    decide = prompt_policy(plan.prefill, policy, model, plan.max_steps)
    groups = [[p] for p in progresses] if plan.prefill == "shared" else [progresses]
    for group in groups:
        group = sorted(group, key=lambda p: p.slot)
        lengths = [p.request.prefill for p in group]
        slots = np.repeat([p.slot for p in group], lengths)
        positions = np.concatenate([np.arange(n) for n in lengths])
        where = torch.from_numpy(slots).to(tables.device), torch.from_numpy(positions).to(tables.device)
        own = [p.request.threshold for p in group] if decide is policy else []
        thresholds = np.repeat([np.nan if t is None else t for t in own], lengths) if any(t is not None for t in own) else None
        rows = Rows(
            slots,
            positions,
            tables.text[where],
            tables.start_noise(*where),
            shared=plan.prefill == "shared",
            thresholds=thresholds,
        )
        exits = run_rounds(model, decide, tables.cache, rows, max_steps=plan.max_steps, meter=meter)
        for progress in group:
            if progress.slot in exits.broken:
                tables.cache.clear(progress.slot)
                progress.request = progress.request.as_prompt(0)
                progress.stopped = "" if plan.prefill == "adaptive" else "nonfinite"
        _commit(model, tables, rows, exits, group, meter)


def _commit(model: RecurrentModel, tables: Tables, rows: Rows, exits: Exits, group: list[Progress], meter: Meter) -> None:
    sound = [p for p in group if p.slot not in exits.broken]
    per_pass = max(1, READOUT_ELEMENTS // (model.spec.vocab_size * max((p.request.prefill for p in sound), default=1)))
    for first in range(0, len(sound), per_pass):
        some = sound[first : first + per_pass]
        chosen = np.flatnonzero(np.isin(rows.slots, [p.slot for p in some]))
        slots, positions = rows.slots[chosen], rows.positions[chosen]
        index = torch.from_numpy(chosen).to(tables.device)
        context = PackedContext(tables.cache, slots, positions)
        with meter.stage("readout"):
            logits = model.readout(exits.state[index], context.at(READOUT))
            meter.readouts += len(chosen)
        ends = np.cumsum([p.request.prefill for p in some])
        drawing = [(end - 1, p) for end, p in zip(ends, some, strict=True) if p.generates_after(p.request.prefill - 1)]
        where = torch.from_numpy(slots).to(tables.device), context.positions
        generating = torch.tensor([row for row, _ in drawing], dtype=torch.int64, device=tables.device)
        tables.answer(*where, logits, generating, [progress for _, progress in drawing])
        for progress, end in zip(some, ends, strict=True):
            own = chosen[end - progress.request.prefill : end]
            progress.steps += exits.steps[own].tolist()
            progress.outcomes += outcomes_of(exits.steps[own], tables.plan.max_steps)
            progress.fired += exits.fired[own].tolist()
            progress.position = progress.request.prefill


def check_length(tokens: int, new_tokens: int, model: RecurrentModel) -> None:
    """Raises UserError when a sequence is empty or does not fit the model."""
    if tokens == 0:
        raise UserError("an empty prompt has nothing to decode from: give at least one token")
    if tokens + new_tokens > model.spec.max_length:
        raise UserError(
            f"{tokens} prompt tokens and {new_tokens} new ones exceed the model's {model.spec.max_length} positions: "
            "shorten the prompt or max_new_tokens"
        )
