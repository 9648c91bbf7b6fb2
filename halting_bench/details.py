"""What is kept of the selected points only: rows by subset, figures by document, histograms of exits.

Selected are the uniform depths, the calibration front, the iso-quality points and the oracles.
Shapes: N rows of a shard, G points, M documents, R steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from halting_bench.engine.points import TracedUnit
from halting_bench.engine.replay import Rows, Tally
from halting_bench.store import Arrays
from halting_bench.tabulation import outcome_columns

if TYPE_CHECKING:
    import pandas as pd

DECILES = "loss-decile"

TallyShard = Callable[[int, Arrays, Rows, np.ndarray], Tally]
"""(shard number, shard, all its rows, bool [N] which of them) -> the sums of G points over those rows."""


@dataclass(frozen=True)
class Selected:
    """G chosen points of one policy."""

    policy: str
    thresholds: np.ndarray
    tally: TallyShard
    every_step: tuple[float, float]


def subset_families(names: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """A benchmark's subset families and ours: tenths of the full-depth loss, easiest first."""
    return {**names, DECILES: tuple(str(i) for i in range(1, 11))}


def decile_edges(unit: TracedUnit) -> np.ndarray:
    """The nine inner edges of the calibration rows' loss at full depth."""
    losses = [
        shard["loss"][unit.in_split("calibration")[unit.document_index(shard)], unit.mean - 1].astype(np.float64)
        for shard in unit.shards
    ]
    return np.nanquantile(np.concatenate(losses), np.arange(1, 10) / 10)


def _codes(unit: TracedUnit, shard: Arrays, family: str, edges: np.ndarray) -> np.ndarray:
    if family == DECILES:
        return np.searchsorted(edges, shard["loss"][:, unit.mean - 1].astype(np.float64), side="left")
    return shard[f"code/{family}"]


def _sum(total: Tally | None, part: Tally) -> Tally:
    if total is None:
        return part
    total.add(part)
    return total


def document_rows(unit: TracedUnit, selected: Selected) -> tuple["pd.DataFrame", np.ndarray]:
    """Per-document figures of both splits, and the exit histogram [G, R] of the test split."""
    import pandas as pd

    whole: Tally | None = None
    test: Tally | None = None
    for number, (shard, rows) in enumerate(unit.rows(selected.every_step)):
        in_test = unit.in_split("test")[rows.document]
        whole = _sum(whole, selected.tally(number, shard, rows, np.ones_like(in_test)))
        test = _sum(test, selected.tally(number, shard, rows, in_test))
    if whole is None or test is None:
        raise ValueError("a unit has at least one shard")
    points, documents = whole.quality.shape
    frame = pd.DataFrame(
        {
            "policy": selected.policy,
            "threshold": np.repeat(selected.thresholds, documents),
            "split": np.tile(np.where(unit.in_split("calibration"), "calibration", "test"), points),
            "document": np.tile(np.array(unit.documents), points),
            "n_tokens": np.tile(unit.counts, points),
            "quality_sum": whole.quality.ravel(),
            "depth_sum": whole.depth.ravel(),
        }
    )
    return frame, test.histogram


def subset_rows(
    unit: TracedUnit, selected: Selected, families: dict[str, tuple[str, ...]], edges: np.ndarray
) -> Iterator[tuple[str, "pd.DataFrame", np.ndarray]]:
    """(subset, its columns, its exit histogram [G, R]) of the test rows of every subset that has any."""
    for family, names in families.items():
        totals: dict[int, Tally] = {}
        counts: dict[int, np.ndarray] = {}
        for number, (shard, rows) in enumerate(unit.rows(selected.every_step)):
            codes = np.where(unit.in_split("test")[rows.document], _codes(unit, shard, family, edges), -1)
            for code in np.unique(codes[codes >= 0]).tolist():
                mask = codes == code
                totals[code] = _sum(totals.get(code), selected.tally(number, shard, rows, mask))
                found = np.bincount(rows.document[mask], minlength=len(unit.documents))
                counts[code] = counts.get(code, 0) + found
        for code in sorted(totals):
            frame = outcome_columns(totals[code].quality, counts[code], totals[code], unit.metric)
            frame["threshold"] = selected.thresholds
            yield f"{family}:{names[code]}", frame.assign(policy=selected.policy), totals[code].histogram


def histogram_frame(policy: str, thresholds: np.ndarray, subset: str, histogram: np.ndarray) -> "pd.DataFrame":
    """Exit counts in long form; steps at which nothing stopped are left out."""
    import pandas as pd

    point, step = np.nonzero(histogram)
    return pd.DataFrame(
        {
            "policy": policy,
            "threshold": thresholds[point],
            "subset": subset,
            "step": step + 1,
            "count": histogram[point, step],
        }
    )


def convergence_frame(unit: TracedUnit) -> "pd.DataFrame":
    """Median, 10th and 90th percentile of every recorded signal at each step, over all scored rows."""
    import pandas as pd

    names = sorted(name for name in unit.shards[0].names if name.startswith("score/"))
    out = []
    for name in names:
        scores = np.concatenate([shard[name] for shard in unit.shards]).astype(np.float64)
        for step in range(scores.shape[1]):
            known = scores[:, step][np.isfinite(scores[:, step])]
            if len(known):
                low, middle, high = np.quantile(known, (0.1, 0.5, 0.9))
                out.append((name.removeprefix("score/"), step + 1, middle, low, high, len(known)))
    return pd.DataFrame(out, columns=["signal", "step", "median", "p10", "p90", "n"])
