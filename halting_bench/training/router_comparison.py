"""Routers beside the free rules: each at its cheapest threshold of equal quality, on the same states.

Routers are trained on one part of the documents, thresholds chosen on the next, and everything is reported on the last.
Shapes: N rows, R = max_steps, M documents.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from halting_bench.analysis.statistics import mean_interval, paired_difference
from halting_bench.engine.replay import Rule, exits_at, running_extremum, unsigned_threshold
from halting_bench.halting.routers import Router
from halting_bench.halting.signals import SIGNALS
from halting_bench.records import Metric
from halting_bench.training.routers import FREE_RULES, Harvest, router_scores

CANDIDATES = 400


def compare(calibration: Harvest, test: Harvest, routers: dict[str, Router], trained: int) -> list[dict[str, Any]]:
    """Every rule at its cheapest threshold of equal quality: chosen on `calibration`, reported on `test`.

    Args:
        calibration, test: different documents.
        routers: by name.
        trained: the trained depth; full-depth quality is that of the uniform depth.

    Returns:
        One row a rule, dearest first: mean_depth and its interval, quality, and difference to full depth with a paired
        interval over documents. A rule that reaches no equal quality has threshold None.
    """
    rows = [_uniform_row(calibration, test, trained), _saturation_row(test, trained)]
    for name, rule, scores in _rules(calibration, test, routers):
        rows.append({"rule": name} | _chosen(calibration, test, scores, rule, trained))
    return sorted(rows, key=lambda row: -row["mean_depth"])


def _rules(
    calibration: Harvest, test: Harvest, routers: dict[str, Router]
) -> Iterator[tuple[str, Rule, tuple[np.ndarray, np.ndarray]]]:
    for name, hits in FREE_RULES.items():
        signal = SIGNALS[name]
        both = (calibration.shard[f"score/{name}"], test.shard[f"score/{name}"])
        yield name, Rule(name, signal.fires, signal.closed, hits), both
    for name, router in routers.items():
        rule = Rule(name, "above", closed=router.cumulative)
        yield name, rule, (router_scores(router, calibration), router_scores(router, test))


def _sign(metric: Metric) -> int:
    return 1 if metric.higher_is_better else -1


def _enough(outcome: np.ndarray, found: Harvest, trained: int) -> bool:
    """Whether outcomes [N] are as good as full depth's, within the metric's tolerance."""
    full = found.outcome[:, trained - 1].mean()
    return bool(_sign(found.metric) * (outcome.mean() - full) >= -found.metric.tolerance)


def _chosen(
    calibration: Harvest, test: Harvest, scores: tuple[np.ndarray, np.ndarray], rule: Rule, trained: int
) -> dict[str, Any]:
    extremum, rows = running_extremum(scores[0], rule), np.arange(len(calibration.latent))
    finite = np.unique(extremum[np.isfinite(extremum)])
    bounds = finite[np.unique(np.linspace(0, len(finite) - 1, CANDIDATES).astype(int))] if len(finite) else finite
    steps = extremum.shape[1]
    for bound in bounds[::-1]:  # the loosest first
        exits = np.minimum(exits_at(extremum, bound), steps)
        if _enough(calibration.outcome[rows, exits - 1], calibration, trained):
            tested = np.minimum(exits_at(running_extremum(scores[1], rule), bound), steps)
            return {"threshold": float(unsigned_threshold(np.array(bound), rule))} | _figures(test, tested, trained)
    return {"threshold": None} | _figures(test, np.full(len(test.latent), steps), trained)


def _uniform_row(calibration: Harvest, test: Harvest, trained: int) -> dict[str, Any]:
    enough = (k for k in range(1, trained + 1) if _enough(calibration.outcome[:, k - 1], calibration, trained))
    depth = next(enough)
    return {"rule": "fixed", "threshold": depth} | _figures(test, np.full(len(test.latent), depth), trained)


def _saturation_row(test: Harvest, trained: int) -> dict[str, Any]:
    return {"rule": "oracle-saturation", "threshold": None} | _figures(test, test.shard["saturation"].astype(int), trained)


def _figures(test: Harvest, exits: np.ndarray, trained: int) -> dict[str, Any]:
    _, document = np.unique(test.shard["document"], return_inverse=True)
    counts, outcome = np.bincount(document), test.outcome
    own = outcome[np.arange(len(exits)), exits - 1]
    depth, low, high = mean_interval(np.bincount(document, exits.astype(float))[None], counts, bounded=False)
    sign = _sign(test.metric)
    full = np.bincount(document, sign * outcome[:, trained - 1])
    delta, delta_low, delta_high = paired_difference(np.bincount(document, sign * own), full, counts)
    return {
        "mean_depth": float(depth[0]), "depth_lo": float(low[0]), "depth_hi": float(high[0]), "quality": float(own.mean()),
        "delta": float(delta), "delta_lo": float(delta_low), "delta_hi": float(delta_high),
    }  # fmt: skip
