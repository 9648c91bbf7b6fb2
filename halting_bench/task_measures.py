"""What lm-eval's tasks measure, per document and aggregated over a part of the documents, with intervals.

Shapes: G operating points, D draws, M documents in sample order.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halting_bench.analysis.statistics import mean_interval
from halting_bench.benchmarks.lm_eval_bridge import Suite
from halting_bench.benchmarks.lm_eval_results import metrics_of
from halting_bench.errors import UserError

JACKKNIFE_GROUPS = 20

Values = list[list[list[Any]]]
"""The metric by point, draw and document in sample order, as its aggregation takes it; None: the document has none."""


@dataclass(frozen=True)
class Measure:
    """One metric of one task, or of all tasks pooled. It takes the place of records.Metric in choosing points."""

    name: str  # as lm-eval names it: `acc`, or `exact_match,strict-match` when it has filters
    key: str  # `metric,filter`
    subset: str  # of its rows: `all`, `metric:NAME` or `task:NAME`
    tasks: tuple[str, ...]
    higher_is_better: bool
    is_mean: bool
    primary: bool

    @property
    def metric(self) -> str:
        return self.key.partition(",")[0]

    @property
    def tolerance(self) -> float:
        """How much worse than full depth still counts as equal quality, in the metric's own unit."""
        return 0.002 if self.higher_is_better else 0.005


def measures(suite: Suite, results: dict[str, Any]) -> list[Measure]:
    """What rows to write: one metric under `all`, further ones under `metric:NAME`, and by task where there are several.

    The one is the first that is a mean over documents, since those compare in pairs; else the first.

    Raises:
        UserError: several tasks have no mean metric in common.
    """
    keys = {task: list(metrics_of(results, task)) for task in suite.tasks}
    tasks = tuple(suite.tasks)
    shared = keys[tasks[0]]
    if len(tasks) > 1:
        shared = [k for k in shared if all(k in keys[t] and suite.is_mean(t, k.partition(",")[0]) for t in tasks)]
        if not shared:
            raise UserError(f"tasks {', '.join(tasks)} share no metric that is a mean over documents: sweep them one by one")
    first = next((key for key in shared if suite.is_mean(tasks[0], key.partition(",")[0])), shared[0])
    shared = [first, *(key for key in shared if key != first)]
    found = [_measure(suite, key, tasks, "all" if key == first else f"metric:{_name(key)}", key == first) for key in shared]
    if len(tasks) > 1:
        found += [_measure(suite, first, (task,), f"task:{task}", False) for task in tasks]
    return found


def read_measures(path: Path) -> list[Measure]:
    """Measures that a unit has written down."""
    return [Measure(**{**given, "tasks": tuple(given["tasks"])}) for given in json.loads(path.read_text(encoding="utf-8"))]


def _name(key: str) -> str:
    return key.removesuffix(",none")


def _measure(suite: Suite, key: str, tasks: tuple[str, ...], subset: str, primary: bool) -> Measure:
    metric = key.partition(",")[0]
    higher, mean = suite.higher_is_better(tasks[0], metric), suite.is_mean(tasks[0], metric)
    return Measure(_name(key), key, subset, tasks, higher, mean, primary)


def document_values(suite: Suite, results: dict[str, Any], measure: Measure, place: np.ndarray) -> list[Any]:
    """The metric of each document in sample order, as its aggregation takes it; None where a document is of another task.

    Args:
        results: lm-eval's, its samples being enough.
        place: int64 [M], the place in the sample of each document number.
    """
    metric, _, kept = measure.key.partition(",")
    numbers = {document: number for number, document in enumerate(suite.documents)}
    values: list[Any] = [None] * len(place)
    for task in measure.tasks:
        for sample in results["samples"][task]:
            if sample["filter"] == kept and metric in sample:
                values[place[numbers[task, sample["doc_id"]]]] = sample[metric]
    return values


def summarise(suite: Suite, measure: Measure, values: Values, mask: np.ndarray) -> np.ndarray:
    """The metric over some documents with the two ends of its 95 % interval, [3, G].

    Args:
        suite: knows how the metric is aggregated.
        measure: the metric.
        values: see `Values`. Draws are averaged: by document where the metric is a mean over documents.
        mask: bool [M]; documents of other tasks count for nothing.
    """
    kept = np.flatnonzero(mask & has_value(values))
    if measure.is_mean:
        matrix = mean_matrix(values)[:, kept]
        sound = ~np.isnan(matrix).any(axis=1)
        found = np.full((3, len(matrix)), np.nan)
        bounded = bool(((matrix[sound] >= 0) & (matrix[sound] <= 1)).all())
        found[:, sound] = mean_interval(matrix[sound], np.ones(len(kept)), bounded=bounded)
        return found
    draws = [[_jackknife(suite, measure, [row[document] for document in kept]) for row in point] for point in values]
    return np.array(draws).mean(axis=1).T


def has_value(values: Values) -> np.ndarray:
    """Documents that the metric is defined for, bool [M]; the same for every point that did not break."""
    rows = [row for point in values for row in point]
    return np.array([all(value is not None for value in document) for document in zip(*rows, strict=True)])


def mean_matrix(values: Values) -> np.ndarray:
    """float64 [G, M], the mean over draws; 0 where a document has none."""
    matrix = [[[0.0 if value is None else float(value) for value in row] for row in point] for point in values]
    return np.array(matrix).mean(axis=1)


def _jackknife(suite: Suite, measure: Measure, values: list[Any]) -> tuple[float, float, float]:
    """Any aggregation, its error from leaving out a group of documents at a time (Efron and Tibshirani, ch. 11)."""
    from scipy.special import stdtrit

    def aggregate(some: list[Any]) -> float:
        return suite.aggregate(measure.tasks[0], measure.metric, some)

    if any(isinstance(value, float) and math.isnan(value) for value in values):
        return math.nan, math.nan, math.nan
    whole, groups = aggregate(values), min(JACKKNIFE_GROUPS, len(values))
    if groups < 2 or math.isnan(whole):
        return whole, math.nan, math.nan
    left_out = np.array([aggregate([v for i, v in enumerate(values) if i % groups != group]) for group in range(groups)])
    error = math.sqrt((groups - 1) / groups * float(np.square(left_out - left_out.mean()).sum()))
    half = float(stdtrit(groups - 1, 0.975)) * error
    return whole, whole - half, whole + half
