"""Replay everything: from a trace shard to the exits, quality and cost of any threshold, without the model.

A one-signal threshold rule exits at the first step k whose *running extremum* E[n, k] (the best score so far over
windows of `hits` checks) crosses the threshold. E never rises with k, so each row's exit is a step function of the
threshold that changes only at its own E values. Summing those changes gives every threshold at once:

    total(t) = sum_n y[n, R] + sum_{n, k < R: E[n, k] < t} (y[n, k] - y[n, k + 1])

Binning the second sum by the thresholds of a grid costs one pass over the trace, however many thresholds there are;
sorting it instead gives the exact curve over all of them. Imports no torch.

Shapes: N rows, R = max_steps, G thresholds, M documents.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rule:
    """A threshold rule as the replay needs it (halting.policies.ThresholdPolicy without its threshold)."""

    signal: str
    fires: str  # "below" or "above"
    closed: bool = False
    hits: int = 1
    min_steps: int = 1
    every: int = 1


def running_extremum(scores: np.ndarray, rule: Rule) -> np.ndarray:
    """E [N, R] of scores [N, R], signed so that smaller is nearer to halting; infinite where the rule cannot fire.

    NaN never halts and breaks a run of hits; steps before `min_steps` count as hits but cannot halt.
    """
    signed = scores if rule.fires == "below" else -scores
    signed = np.where(np.isnan(signed), np.inf, signed)
    checked = signed[:, rule.every - 1 :: rule.every]  # steps that are multiples of `every`
    window = checked.copy()
    for back in range(1, rule.hits):
        window[:, back:] = np.maximum(window[:, back:], checked[:, :-back])
        window[:, :back] = np.inf
    full = np.full_like(signed, np.inf)
    full[:, rule.every - 1 :: rule.every] = window
    full[:, : rule.min_steps - 1] = np.inf
    return np.minimum.accumulate(full, axis=1)


def signed_threshold(thresholds: np.ndarray, rule: Rule, dtype: np.dtype) -> np.ndarray:
    """Thresholds in the scores' own precision and E's sign, moved so that `E < t` is the whole test."""
    exact = np.asarray(thresholds, np.float64).astype(dtype)
    signed = exact if rule.fires == "below" else -exact
    return np.nextafter(signed, np.asarray(np.inf, dtype)) if rule.closed else signed


def unsigned_threshold(bound: np.ndarray, rule: Rule) -> np.ndarray:
    """The inverse of `signed_threshold`."""
    signed = np.nextafter(bound, np.asarray(-np.inf, bound.dtype)) if rule.closed else bound
    return signed if rule.fires == "below" else -signed


def recorded_threshold(bounds: np.ndarray, rule: Rule) -> np.ndarray:
    """Thresholds as records name them, float64 [G]: the shortest decimal that is that threshold in the scores' precision.

    So 0.03 stays 0.03 in a float32 run, and `signed_threshold` gives the same bound back.
    """
    return np.array([float(str(value)) for value in unsigned_threshold(bounds, rule)], np.float64)


@dataclass(frozen=True)
class Rows:
    """What a tally needs to know of rows besides the scores."""

    number: np.ndarray  # int64 [N]: the row's number in the whole sample, for fingerprints
    outcome: np.ndarray  # float64 [N, R]: the metric's per-token value had the row stopped at that step
    document: np.ndarray  # int64 [N]: 0-based index of the row's document in the sample
    last_step: np.ndarray  # int64 [N]: the step at which the row's state broke; R + 1: it did not
    step_flops: np.ndarray  # float64 [N]: FLOPs of one watched step for this row

    def take(self, which: np.ndarray) -> "Rows":
        return Rows(**{name: value[which] for name, value in vars(self).items()})


@dataclass
class Tally:
    """Sums over rows of G operating points, by document where statistics need it. Adding two tallies adds their rows."""

    quality: np.ndarray  # float64 [G, M]
    depth: np.ndarray  # int64 [G, M]: core steps
    histogram: np.ndarray  # int64 [G, R]: rows that stopped at each step, whatever the reason
    halted: np.ndarray  # int64 [G]: fired before R
    never: np.ndarray  # int64 [G]: would not have fired even at R
    nonfinite: np.ndarray  # int64 [G]
    step_flops: np.ndarray  # float64 [G]
    fingerprint: np.ndarray  # uint64 [G]: equal exits have equal fingerprints

    def add(self, other: "Tally") -> None:
        for name, value in vars(self).items():
            value += getattr(other, name)  # in place


def tally_thresholds(extremum: np.ndarray, bounds: np.ndarray, rows: Rows, documents: int) -> Tally:
    """Every threshold of a grid in one pass.

    Args:
        extremum: E [N, R].
        bounds: [G] signed thresholds, ascending (see `signed_threshold`).
        rows: the same rows' outcomes.
        documents: M.
    """
    steps = extremum.shape[1]
    broken = rows.last_step <= steps
    if broken.any():  # rare: the obvious form, since a missing outcome (NaN) must not touch thresholds that avoid it
        exits = np.stack([exits_at(extremum[broken], bound) for bound in bounds])
        tally = tally_thresholds(extremum[~broken], bounds, rows.take(~broken), documents)
        tally.add(tally_exits(exits, rows.take(broken), documents))
        return tally
    n, grid = len(extremum), len(bounds)
    fires = np.searchsorted(bounds, extremum, side="right")  # [N, R] the first threshold above E; `grid`: none
    early = fires[:, :-1]  # a rule that fires at R saved nothing

    def summed(per_step: np.ndarray) -> np.ndarray:
        """[G] from [N, R] values had the row stopped at each step."""
        moved = _sums(early.ravel(), (per_step[:, :-1] - per_step[:, 1:]).ravel(), grid + 1)
        return per_step[:, -1].sum() + np.cumsum(moved[:grid])

    def by_document(per_step: np.ndarray) -> np.ndarray:
        cell = early * documents + rows.document[:, None]
        change = per_step[..., :-1] - per_step[..., 1:]
        moved = _sums(cell.ravel(), np.broadcast_to(change, early.shape).ravel(), (grid + 1) * documents)
        base = _sums(rows.document, np.broadcast_to(per_step[..., -1], n), documents)
        return base + np.cumsum(moved.reshape(grid + 1, documents)[:grid], axis=0)

    by_step = np.bincount((early * (steps - 1) + np.arange(steps - 1)).ravel(), minlength=(grid + 1) * (steps - 1))
    fired_by = np.cumsum(by_step.reshape(grid + 1, steps - 1)[:grid], axis=0)  # [G, R-1] rows that stopped at k or before
    fired_by = np.concatenate((fired_by, np.full((grid, 1), n)), axis=1)
    tokens = row_tokens(rows.number, steps)
    moved = np.zeros(grid + 1, np.uint64)
    np.add.at(moved, early.ravel(), (tokens[:, :-1] - tokens[:, 1:]).ravel())
    ever = np.cumsum(np.bincount(fires[:, -1], minlength=grid + 1)[:grid])
    return Tally(
        quality=by_document(rows.outcome),
        depth=np.rint(by_document(np.arange(1.0, steps + 1))).astype(np.int64),
        histogram=np.diff(fired_by, axis=1, prepend=0),
        halted=fired_by[:, -2] if steps > 1 else np.zeros(grid, np.int64),
        never=n - ever,
        nonfinite=np.zeros(grid, np.int64),
        step_flops=summed(np.arange(1, steps + 1) * rows.step_flops[:, None]),
        fingerprint=tokens[:, -1].sum(dtype=np.uint64) + np.cumsum(moved[:grid], dtype=np.uint64),
    )


def tally_exits(exits: np.ndarray, rows: Rows, documents: int) -> Tally:
    """The same sums from explicit exits: the obvious form, for controls and opaque policies.

    Args:
        exits: int [G, N], the step at which each row would stop, R + 1 where it never would.
    """
    steps = rows.outcome.shape[1]
    each = np.arange(len(rows.number))
    tokens = row_tokens(rows.number, steps)
    parts = []
    for exit_step in exits:
        ran = np.minimum(exit_step, steps)
        broke = rows.last_step <= ran
        stop = np.minimum(ran, rows.last_step).astype(np.int64)
        parts.append(
            Tally(
                quality=_sums(rows.document, rows.outcome[each, stop - 1], documents)[None],
                depth=_sums(rows.document, stop, documents).astype(np.int64)[None],
                histogram=np.bincount(stop - 1, minlength=steps)[None],
                halted=np.array([((stop < steps) & ~broke).sum()]),
                never=np.array([((exit_step > steps) & ~broke).sum()]),
                nonfinite=np.array([broke.sum()]),
                step_flops=np.array([(stop * rows.step_flops).sum()]),
                fingerprint=np.array([tokens[each, stop - 1].sum(dtype=np.uint64)]),
            )
        )
    return Tally(**{name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])})


def _sums(index: np.ndarray, weights: np.ndarray, size: int) -> np.ndarray:
    """Weighted bincount, float64 also where there is nothing to count."""
    return np.bincount(index, weights, minlength=size).astype(np.float64, copy=False)


def row_tokens(rows: np.ndarray, steps: int) -> np.ndarray:
    """Fixed pseudo-random uint64 [N, R], one per (row, step): the sum over a point's exits is its fingerprint."""
    with np.errstate(over="ignore"):
        number = rows.astype(np.uint64)[:, None] * np.uint64(steps) + np.arange(1, steps + 1, dtype=np.uint64)
        x: np.ndarray = number * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        return x ^ (x >> np.uint64(27))


@dataclass(frozen=True)
class Combination:
    """Several rules at one row and step. A threshold of None is the grid's."""

    rules: tuple[Rule, ...]
    thresholds: tuple[float | None, ...]
    every_rule: bool  # True: all must say so at once; False: any one

    def exits(self, scores: Callable[[str], np.ndarray], threshold: float) -> np.ndarray:
        """The step at which each row would stop, [N]; R + 1 for never. scores(signal) gives [N, R]."""
        halts = [
            halting_steps(scores(rule.signal), rule, threshold if own is None else own)
            for rule, own in zip(self.rules, self.thresholds, strict=True)
        ]
        fired = np.logical_and.reduce(halts) if self.every_rule else np.logical_or.reduce(halts)
        return np.where(fired.any(axis=1), fired.argmax(axis=1) + 1, fired.shape[1] + 1)


def halting_steps(scores: np.ndarray, rule: Rule, threshold: float) -> np.ndarray:
    """Whether the rule says stop at each step, as if it had not stopped before, bool [N, R]."""
    signed = scores if rule.fires == "below" else -scores
    hit = signed < signed_threshold(np.array([threshold]), rule, scores.dtype)[0]
    halts = np.zeros_like(hit)
    run = np.zeros(len(hit), np.int64)
    for step in range(rule.every, hit.shape[1] + 1, rule.every):
        run = np.where(hit[:, step - 1], run + 1, 0)
        if step >= rule.min_steps:
            halts[:, step - 1] = run >= rule.hits
    return halts


def exits_at(extremum: np.ndarray, bound: float) -> np.ndarray:
    """The exit step of each row at one signed threshold, [N]; R + 1 where it never fires. The slow, obvious form."""
    fired = extremum < bound
    return np.where(fired.any(axis=1), fired.argmax(axis=1) + 1, extremum.shape[1] + 1)
