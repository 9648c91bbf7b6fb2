"""Trace once: one full-depth pass that records, per (scored token, step), every signal and every outcome.

Policies ride along without ever halting: threshold rules need only their signal's score, opaque ones (a user's own
class) keep the first step at which they would have stopped. Everything else is arithmetic on the shard (replay.py).

Shapes: B sequences of T positions in a batch, D width, V vocabulary, N scored rows of a shard, R = max_steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.noise import initial_noise
from halting_bench.benchmarks.base import NOT_SCORED, Sequence
from halting_bench.engine.riders import Riders
from halting_bench.errors import UserError
from halting_bench.halting.policy import HaltingPolicy, View, undefined_readout
from halting_bench.halting.signals import SIGNALS, Features

Shard = dict[str, np.ndarray]
"""Columns of one shard, rows first: `score/<signal>` [N, R], `loss` [N, R] (nats), `correct` [N, R] (uint8),
`exit/<key>` [N] (first exit of an opaque policy, R + 1: never) or, of one that raised, `error/<key>` (UTF-8),
`saturation` [N] (first step from which the argmax stays), `last_step` [N] (the step at which the state broke, R + 1: it did
not), `sequence`, `document`, `position`, `target` [N], and `code/<family>` [N]."""


@dataclass(frozen=True)
class TracePlan:
    """What one pass must record."""

    signals: tuple[str, ...]
    max_steps: int
    seed: int
    opaque: dict[str, HaltingPolicy] = field(default_factory=dict)
    batch_tokens: int = 4096


def trace(model: RecurrentModel, sequences: list[Sequence], plan: TracePlan) -> Shard:
    """Runs every sequence to full depth once.

    Rows come out in the order of `sequences`, whatever the batching. One-loop models only: with several loops an exit
    in the first changes what the next one sees, and such rows are executed instead.
    """
    if len(model.spec.loops) != 1:
        raise ValueError(f"a {model.spec.family} model of {len(model.spec.loops)} loops cannot be traced: execute its points")
    if whole := [name for name in plan.signals if SIGNALS[name].whole_sequence and not model.spec.causal]:
        raise ValueError(f"a trace keeps scored positions, {whole[0]} needs all of an encoder's sequence: execute its points")
    longest = max((len(s.tokens) for s in sequences), default=0)
    if longest > model.spec.max_length:
        raise UserError(f"a sequence has {longest} tokens, the model holds {model.spec.max_length}: choose another benchmark")
    columns = _empty_shard(sequences, plan, np.dtype(np.float64 if _dtype(model) == torch.float64 else np.float32))
    starts = np.cumsum([0] + [int((s.targets != NOT_SCORED).sum()) for s in sequences])
    for batch in batches_of(sequences, plan.batch_tokens):
        rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in batch])
        if len(rows):
            _trace_batch(model, [sequences[i] for i in batch], plan, columns, rows)
    return columns


def _dtype(model: RecurrentModel) -> torch.dtype:
    return next(model.parameters()).dtype


def batches_of(sequences: list[Sequence], batch_tokens: int) -> Iterable[list[int]]:
    """Indices grouped by similar length, each group's padded size at most `batch_tokens` (or one sequence)."""
    order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i].tokens), i))
    group: list[int] = []
    for index in order:
        if group and (len(group) + 1) * len(sequences[index].tokens) > batch_tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _empty_shard(sequences: list[Sequence], plan: TracePlan, real: np.dtype) -> Shard:
    scored = [np.flatnonzero(s.targets != NOT_SCORED) for s in sequences]
    total, steps = sum(len(s) for s in scored), plan.max_steps

    def gather(values: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate(values).astype(dtype) if values else np.empty(0, dtype)

    columns: Shard = {f"score/{name}": np.empty((total, steps), real) for name in plan.signals}
    columns["loss"] = np.empty((total, steps), real)
    columns["correct"] = np.empty((total, steps), np.uint8)
    columns["saturation"] = np.empty(total, np.int16)
    columns["last_step"] = np.empty(total, np.int16)
    columns |= {f"exit/{key}": np.empty(total, np.int16) for key in plan.opaque}
    columns["sequence"] = gather([np.full(len(p), s.uid) for s, p in zip(sequences, scored, strict=True)], np.int64)
    columns["document"] = gather([np.full(len(p), s.document) for s, p in zip(sequences, scored, strict=True)], np.int64)
    columns["position"] = gather(list(scored), np.int32)
    columns["target"] = gather([s.targets[p] for s, p in zip(sequences, scored, strict=True)], np.int32)
    for family in sequences[0].codes if sequences else ():
        columns[f"code/{family}"] = gather([s.codes[family][p] for s, p in zip(sequences, scored, strict=True)], np.int16)
    return columns


def pad_batch(sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
    """Right-pads with token 0. Returns tokens and targets, int64 [B, T]; padding is NOT_SCORED."""
    length = max(len(s.tokens) for s in sequences)
    tokens = np.zeros((len(sequences), length), np.int64)
    targets = np.full((len(sequences), length), NOT_SCORED, np.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
        targets[row, : len(sequence.targets)] = sequence.targets
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def batch_noise(model: RecurrentModel, sequences: list[Sequence], length: int, seed: int) -> Tensor | None:
    """[B, T, D] initial noise of a batch, or None when the model's loop starts from its input."""
    if not model.spec.loops[0].random_start:
        return None
    uids = np.array([s.uid for s in sequences])
    return initial_noise(seed, uids[:, None], np.arange(length)[None, :], model.spec.width)


@torch.inference_mode()
def _trace_batch(model: RecurrentModel, sequences: list[Sequence], plan: TracePlan, columns: Shard, rows: np.ndarray) -> None:
    tokens, targets = pad_batch(sequences)
    device = next(model.parameters()).device
    scored = (targets != NOT_SCORED).to(device)
    every = bool(scored.all())
    gold = targets.to(device)[scored]
    lengths = torch.tensor([len(s.tokens) for s in sequences], device=device)
    context = DenseContext(tokens.shape[1], causal=model.spec.causal, lengths=lengths, device=device, contain=True)
    x = model.embed(tokens.to(device), context)
    noise = batch_noise(model, sequences, tokens.shape[1], plan.seed)
    state = model.begin(0, x, None if noise is None else noise.to(device))

    def select(full: Tensor) -> Tensor:  # [B, T, *] -> [N, *]
        return full.flatten(0, 1) if every else full[scored]

    def readout() -> Tensor:
        return select(model.readout(model.end(0, state, context), context))

    def view(k: int) -> View:
        latent = select(state)
        step = torch.full((len(latent),), k, device=device)
        gate = (lambda: model.gate(latent)) if model.spec.has_gate else None
        return View(step, latent, readout if k else undefined_readout, gate)

    memory_names = tuple(sorted({name for s in plan.signals for name in SIGNALS[s].remembers} | {"argmax", "unchanged"}))
    start = view(0)
    memory = Features(start, None).remember(memory_names)
    riding = {key: policy for key, policy in plan.opaque.items() if f"error/{key}" not in columns}
    riders = Riders(riding, start, plan.max_steps + 1)
    broken = torch.full((len(gold),), plan.max_steps + 1, device=device)
    for k in range(1, plan.max_steps + 1):
        state = model.step(0, state, x, context)
        here = view(k)
        features = Features(here, memory)
        for name in plan.signals:
            columns[f"score/{name}"][rows, k - 1] = SIGNALS[name].score(features).cpu().numpy()
        loss = -features.log_p.gather(1, gold[:, None])[:, 0]
        columns["loss"][rows, k - 1] = loss.cpu().numpy()
        columns["correct"][rows, k - 1] = (features.argmax == gold).cpu().numpy()
        fine = features.latent_norm.isfinite() & loss.isfinite()
        broken = torch.where(~fine & (broken > k), k, broken)
        riders.step(here)
        memory = features.remember(memory_names)
    columns["saturation"][rows] = (plan.max_steps - memory["unchanged"].clamp(min=0)).cpu().numpy()
    columns["last_step"][rows] = broken.cpu().numpy()
    for key, first in riders.exits.items():
        columns[f"exit/{key}"][rows] = first.cpu().numpy()
    for key, error in riders.errors.items():
        columns[f"error/{key}"] = np.frombuffer(error.encode(), np.uint8)
        del columns[f"exit/{key}"]
    _mask_broken(columns, rows)


def _mask_broken(columns: Shard, rows: np.ndarray) -> None:
    """From the step at which a row broke there is no loss (NaN, never a stand-in), and no answer is right."""
    last = columns["last_step"][rows]
    steps = columns["loss"].shape[1]
    bad = (np.arange(1, steps + 1) >= last[:, None]) & ~np.isfinite(columns["loss"][rows])
    if bad.any():
        columns["loss"][rows] = np.where(bad, np.nan, columns["loss"][rows])
        columns["correct"][rows] = np.where(bad, 0, columns["correct"][rows])
