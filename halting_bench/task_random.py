"""The random-exit control of replayed tasks: a point's own exits, handed to other tokens of the same split.

It asks whether it matters which tokens stop. A task's metric is no mean over tokens, so its expectation has no closed
form; it is the mean over seeded draws, each the same permutation for every point: points differ by their exits alone.

Shapes: G operating points, M documents in sample order, N rows of the trace, R steps, D draws.
"""

import numpy as np

from halting_bench.benchmarks.asks import Answer, AnswerSums
from halting_bench.benchmarks.lm_eval_benchmark import LmEvalBenchmark
from halting_bench.engine.points import SPLITS, TracedUnit
from halting_bench.engine.replay import Tally
from halting_bench.tabulation import Points
from halting_bench.task_cells import ALL, Cell, Group, Ran, base_flops, task_masks
from halting_bench.task_rows import CellRows
from halting_bench.unit import Unit

DRAWS = 32
_STREAM = 0x72616E64


def random_cell(
    unit: Unit, traced: TracedUnit, benchmark: LmEvalBenchmark, cell: CellRows, thresholds: tuple[float, ...]
) -> Cell:
    """The control of some points of a finished cell."""
    chosen = np.flatnonzero(cell.is_one_of(thresholds))
    points = Points(
        f"random@{cell.policy}", cell.thresholds[chosen], "control", 1, 1, str(cell.rows["params"].iloc[0]), needs_logits=False
    )
    histograms = dict(zip(SPLITS, cell.histogram[:, chosen], strict=True))
    return Cell(points.policy, lambda: _run(unit, traced, benchmark, points, histograms))


def _run(unit: Unit, traced: TracedUnit, benchmark: LmEvalBenchmark, points: Points, histograms: dict[str, np.ndarray]) -> Ran:
    document = np.concatenate([traced.document_index(shard) for shard in traced.shards])
    rows = {split: np.flatnonzero(traced.in_split(split)[document]) for split in SPLITS}
    masks = {group: mask for group, mask in task_masks(benchmark, unit).items() if group[0] == ALL}

    def exits(point: int) -> np.ndarray:
        """Int [D, N]."""
        drawn = np.empty((DRAWS, len(document)), np.int16)
        for split, own in rows.items():
            steps = np.repeat(np.arange(1, traced.steps + 1), histograms[split][point])
            for draw in range(DRAWS):
                drawn[draw, own] = np.random.default_rng([_STREAM, unit.seed, draw]).permutation(steps)
        return drawn

    def answers(point: int) -> list[dict[int, list[Answer]]]:
        drawn, first = exits(point), 0
        sums = AnswerSums(benchmark.suite.asks, benchmark.encoded, DRAWS)
        for shard in traced.shards:
            each = np.arange(len(shard["sequence"]))
            step = np.minimum(drawn[:, first : first + len(each)], shard["last_step"]).astype(np.int64) - 1
            sums.add(shard["sequence"], shard["loss"][each, step], shard["correct"][each, step])
            first += len(each)
        return [sums.answers(draw) for draw in range(DRAWS)]

    tallies = {group: _tally(traced, histograms, group, mask) for group, mask in masks.items()}
    base = {group: base_flops(traced, False, mask) for group, mask in masks.items()}
    return Ran(points, answers, tallies, traced.counts, base)


def _tally(traced: TracedUnit, histograms: dict[str, np.ndarray], group: Group, mask: np.ndarray) -> Tally:
    """Sums of G points over a split; by document they are expectations, rounded."""
    histogram = np.asarray(sum(histograms.values())) if group[1] == ALL else histograms[group[1]]
    points, rows = len(histogram), traced.counts[mask].sum()
    core = histogram @ np.arange(1, traced.steps + 1)
    fixed, per_context = traced.watched_step(False, 0.0)
    return Tally(
        quality=np.zeros((points, len(mask))),
        depth=np.rint(np.outer(core / rows, np.where(mask, traced.counts, 0))).astype(np.int64),
        histogram=histogram,
        halted=histogram[:, :-1].sum(axis=1),
        never=np.zeros(points, np.int64),
        nonfinite=np.zeros(points, np.int64),
        step_flops=core * (fixed + per_context * traced.context_sums[mask].sum() / rows),
        fingerprint=np.zeros(points, np.uint64),
    )
