"""The cells of a task sweep: how each policy's operating points are answered, by replay or by running them.

Shapes: G operating points, M documents in sample order, A questions, N rows of a shard, R steps.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halting_bench.answering import Answered, Point, Thresholds, answer_points
from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.asks import Answer, AnswerSums
from halting_bench.benchmarks.lm_eval_benchmark import LmEvalBenchmark, numbered
from halting_bench.engine.controls import ORACLE_PRICES, fixed_exits, oracle_exits, saturation_exits
from halting_bench.engine.multi_loop import GivenDepth
from halting_bench.engine.points import ExitSource, TracedUnit, choose_thresholds, grid_bounds
from halting_bench.engine.replay import Rule, Tally, recorded_threshold, running_extremum, tally_exits
from halting_bench.execution import ChosenPoint
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.plan import PolicyPlan, build_policy
from halting_bench.records import Outcome
from halting_bench.store import Arrays
from halting_bench.tabulation import Points
from halting_bench.unit import Unit, describe

ALL = "all"

_HELD = 1 << 20
"""Positions of points side by side whose answers are held at once; so many fill any batch."""

Group = tuple[str, str]
"""(a task's name or `all`, split)."""


@dataclass(frozen=True)
class Ran:
    """G points of one policy, answered. A point whose state broke has NaN answers."""

    points: Points
    answers: Callable[[int], list[dict[int, list[Answer]]]]  # of a point, in each draw: one, unless it is random
    tallies: dict[Group, Tally]  # their `quality` is not used
    counts: np.ndarray  # int64 [M] scored or made tokens of each document; [G, M] where points differ
    base_flops: dict[Group, np.ndarray]  # FLOPs apart from the watched steps, [G] or [1]


@dataclass(frozen=True)
class Cell:
    """One policy of a unit."""

    name: str
    run: Callable[[], Ran]
    not_applicable: str = ""
    file: str = ""  # what it is kept under, when that is not its name


def task_masks(benchmark: LmEvalBenchmark, unit: Unit) -> dict[Group, np.ndarray]:
    """Which documents, in sample order, belong to each group, bool [M]."""
    suite = benchmark.suite
    task_of = np.array([suite.documents[document][0] for document in unit.documents])
    first = np.arange(len(task_of)) < unit.calibration()
    groups = {ALL: np.ones(len(task_of), bool)}
    if len(suite.tasks) > 1:
        groups |= {task: task_of == task for task in suite.tasks}
    splits = {"calibration": first, "test": ~first, ALL: np.ones(len(task_of), bool)}
    return {(group, split): mask & part for group, mask in groups.items() for split, part in splits.items()}


def replayed_cells(
    unit: Unit, traced: TracedUnit, chooser: TracedUnit | None, benchmark: LmEvalBenchmark, scratch: Path
) -> Iterator[Cell]:
    """The controls, then every policy. scratch: a folder for what does not fit in memory."""
    replay = _Replay(unit, traced, benchmark)
    optimistic = '{"optimistic": %s}' % ("true" if chooser is None else "false")
    for name, source, thresholds, params in (
        ("fixed", fixed_exits(traced.steps), np.arange(1.0, traced.steps + 1), "{}"),
        ("oracle-loss", oracle_exits(chooser), np.array(ORACLE_PRICES), optimistic),
        ("oracle-saturation", saturation_exits, np.array([np.nan]), "{}"),
    ):
        points = Points(name, thresholds, "control", 1, 1, params, needs_logits=False)
        yield Cell(name, lambda p=points, s=source: replay.run(p, s, traced.watched_step(False, 0.0)))  # type: ignore[misc]
    for plan in unit.plans:
        yield Cell(plan.recipe.name, lambda plan=plan: replay.policy(plan, scratch), plan.not_applicable)  # type: ignore[misc]


@dataclass(frozen=True)
class _Replay:
    unit: Unit
    traced: TracedUnit
    benchmark: LmEvalBenchmark

    def policy(self, plan: PolicyPlan, scratch: Path) -> Ran:
        every_step = self.traced.watched_step(plan.needs_logits, plan.signal_flops)
        if plan.rule is None:
            thresholds = np.array(plan.recipe.grid.absolute)
            return self.run(describe(plan, thresholds), plan.exits(thresholds.tolist()), every_step)
        choice = choose_thresholds(self.traced, plan.rule, plan.recipe.grid.quantiles, scratch)
        bounds = grid_bounds(plan.rule, plan.recipe.grid.absolute, choice, self.traced.dtype)
        points = describe(plan, recorded_threshold(bounds, plan.rule))
        return self.run(points, rule_exits(plan.rule, bounds), every_step)

    def run(self, points: Points, source: ExitSource, every_step: tuple[float, float]) -> Ran:
        """One pass over the shards: tallies and answers of all points."""
        traced, masks = self.traced, task_masks(self.benchmark, self.unit)
        sums = AnswerSums(self.benchmark.suite.asks, self.benchmark.encoded, len(points.thresholds))
        tallies: dict[Group, Tally] = {}
        for number, (shard, rows) in enumerate(traced.rows(every_step)):
            exits = source(number, shard)
            stop = np.minimum(np.minimum(exits, traced.steps), rows.last_step).astype(np.int64)
            each = np.arange(stop.shape[1])
            sums.add(shard["sequence"], shard["loss"][each, stop - 1], shard["correct"][each, stop - 1])
            for group, mask in masks.items():
                mine = mask[rows.document]
                part = tally_exits(exits[:, mine], rows.take(mine), len(traced.documents))
                if group in tallies:
                    tallies[group].add(part)
                else:
                    tallies[group] = part
        base = {group: base_flops(traced, points.needs_logits, mask) for group, mask in masks.items()}
        return Ran(points, lambda point: [sums.answers(point)], tallies, traced.counts, base)


def base_flops(traced: TracedUnit, needs_logits: bool, mask: np.ndarray) -> np.ndarray:
    """FLOPs of some documents' rows (bool [M]) apart from their watched steps, [1]."""
    stages = [traced.cost.embed, *([] if needs_logits else [traced.cost.readout])]
    rows, context = traced.counts[mask].sum(keepdims=True), traced.context_sums[mask].sum(keepdims=True)
    return np.asarray(sum(fixed * rows + per_context * context for fixed, per_context in stages))


def rule_exits(rule: Rule, bounds: np.ndarray) -> ExitSource:
    """Exits of a threshold rule at signed bounds [G]: a running extremum never rises, so they are counts."""

    def exits(number: int, shard: Arrays) -> np.ndarray:
        extremum = running_extremum(shard[f"score/{rule.signal}"], rule)
        return np.stack([(extremum >= bound).sum(axis=1) + 1 for bound in bounds])

    return exits


def executed_cells(unit: Unit, benchmark: LmEvalBenchmark, model: RecurrentModel, kv_mode: str, prefill: str) -> Iterator[Cell]:
    """Uniform depths (powers of two, the trained depth and the largest), then the absolute thresholds of every policy."""
    execution = _Execution(unit, benchmark, model, kv_mode, prefill)
    powers = {2**i for i in range(unit.max_steps.bit_length()) if 2**i <= unit.max_steps}
    depths = np.array(sorted(powers | {unit.mean_recurrence, unit.max_steps}), float)
    points = Points("fixed", depths, "control", 1, 1, "{}", needs_logits=False)
    yield Cell("fixed", lambda: execution.side_by_side(points, GivenDepth()))
    for plan in unit.plans:
        thresholds = plan.recipe.grid.absolute
        reason = plan.not_applicable or ("" if thresholds else "its recipe has no absolute threshold to execute")
        yield Cell(plan.recipe.name, lambda plan=plan, t=thresholds: execution.policy(plan, t), reason)  # type: ignore[misc]


def acted_cells(
    unit: Unit, chosen: list[ChosenPoint], benchmark: LmEvalBenchmark, model: RecurrentModel, kv_mode: str, prefill: str
) -> Iterator[Cell]:
    """Chosen points of a replayed unit, executed."""
    execution = _Execution(unit, benchmark, model, kv_mode, prefill)
    for plan in unit.plans:
        thresholds = sorted(point.threshold for point in chosen if point.plan is plan)
        if thresholds:
            run = lambda plan=plan, t=thresholds: execution.policy(plan, t)  # noqa: E731 - a default keeps this policy's own
            yield Cell(plan.recipe.name, run, file=f"executed-{plan.recipe.name}")


@dataclass(frozen=True)
class _Execution:
    unit: Unit
    benchmark: LmEvalBenchmark
    model: RecurrentModel
    kv_mode: str
    prefill: str

    def policy(self, plan: PolicyPlan, thresholds: Sequence[float]) -> Ran:
        """Points of a policy: those of one threshold rule share their batches, any others run one by one."""
        points = describe(plan, np.array(thresholds))
        if plan.rule:
            return self.side_by_side(points, build_policy(plan.recipe, float("nan")), plan.signal_flops)
        done = [self._answer(build_policy(plan.recipe, threshold), [None])[0] for threshold in thresholds]
        return self._ran(points, done, plan.signal_flops)

    def side_by_side(self, points: Points, policy: HaltingPolicy, signal_flops: float = 0.0) -> Ran:
        """Points that differ in the policy's threshold alone."""
        return self._ran(points, self._answer(policy, points.thresholds.tolist()), signal_flops)

    def _answer(self, policy: HaltingPolicy, thresholds: Thresholds) -> list[Answered]:
        unit, benchmark = self.unit, self.benchmark
        point = Point(policy, unit.max_steps, benchmark.max_length, self.kv_mode, self.prefill, unit.seed)
        positions = sum(len(sequence.tokens) for sequence in benchmark.encoded.sequences)
        together = max(1, _HELD // max(positions, 1))
        done: list[Answered] = []
        for first in range(0, len(thresholds), together):
            some = thresholds[first : first + together]
            done += answer_points(self.model, benchmark.tokenizer, benchmark.suite.asks, point, some)
        return done

    def _ran(self, points: Points, done: list[Answered], signal_flops: float) -> Ran:
        unit, suite = self.unit, self.benchmark.suite
        place = numbered(suite, unit.documents)
        document = place[np.array([ask.document for ask in suite.asks])]
        counts = np.stack([np.bincount(document, a.histogram.sum(axis=1), minlength=len(place)) for a in done]).astype(np.int64)
        tallies: dict[Group, Tally] = {}
        base: dict[Group, np.ndarray] = {}
        for group, mask in task_masks(self.benchmark, unit).items():
            flops = np.array([self._flops(a, mask[document], points.needs_logits, signal_flops) for a in done])
            base[group] = flops[:, 0]
            tallies[group] = _joined([_tally(a, document, mask, steps) for a, steps in zip(done, flops[:, 1:], strict=True)])
        return Ran(points, lambda point: [done[point].answers], tallies, counts, base)

    def _flops(self, done: Answered, mine: np.ndarray, needs_logits: bool, signal_flops: float) -> tuple[float, float]:
        """Counted FLOPs of the tokens of some questions (bool [A]): apart from the watched steps, and of these."""
        costs = self.model.costs()
        tokens, context = done.histogram[mine].sum(), done.context[mine].sum()
        base = costs["embed"].fixed * tokens + costs["embed"].per_context * context
        if not needs_logits:
            base += costs["readout"].fixed * tokens + costs["readout"].per_context * context
        steps = 0.0
        for loop, (count, at) in enumerate(zip(done.steps[mine].sum(axis=0), done.step_context[mine].sum(axis=0), strict=True)):
            looked = [costs[f"step/{loop}"], *([costs["readout"]] if needs_logits else [])]
            steps += sum(each.fixed * count + each.per_context * at for each in looked) + signal_flops * count
        return float(base), float(steps)


def _tally(done: Answered, document: np.ndarray, mask: np.ndarray, step_flops: np.ndarray) -> Tally:
    """Sums of one executed point over some documents' questions."""
    mine = mask[document]
    depth = done.steps.sum(axis=1)
    outcomes = done.outcomes[mine].sum(axis=0)
    return Tally(
        quality=np.zeros((1, len(mask))),
        depth=np.bincount(document, np.where(mine, depth, 0), minlength=len(mask)).astype(np.int64)[None],
        histogram=done.histogram[mine].sum(axis=0)[None, 1:],
        halted=outcomes[None, Outcome.HALTED],
        never=done.never_fired[mine].sum(keepdims=True),
        nonfinite=outcomes[None, Outcome.NONFINITE],
        step_flops=step_flops,
        fingerprint=np.frombuffer(hashlib.blake2b(done.histogram[mine].tobytes(), digest_size=8).digest(), np.uint64),
    )


def _joined(tallies: list[Tally]) -> Tally:
    return Tally(**{name: np.concatenate([vars(tally)[name] for tally in tallies]) for name in vars(tallies[0])})
