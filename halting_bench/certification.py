"""What may be promised of thresholds, from figures by document that a run keeps: losses, and points tested on its test split.

Shapes: G thresholds, M documents.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench.analysis.calibration import Promise, fastest_certified
from halting_bench.analysis.statistics import mean_of_documents

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Documents:
    """What losses are measured against, and which documents do what. Arrays [M]."""

    counts: np.ndarray
    full: np.ndarray  # summed outcome at full depth
    sign: int
    pilot: np.ndarray  # bool
    tested: np.ndarray  # bool
    shown: np.ndarray  # bool: the test split

    def loss(self, quality: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Quality lost against full depth, a mean over each document's tokens, [G, M']."""
        return self.sign * (self.full[which] - quality[:, which]) / self.counts[which]

    def depth(self, depth: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Mean depth over the tokens of some documents, [G]."""
        return depth[:, which].sum(axis=1) / self.counts[which].sum()


def losses(name: str, loss: np.ndarray, promise: Promise) -> dict[str, float]:
    mean, low, high = mean_of_documents(loss)
    clipped = float(promise.risk(loss).mean() * promise.bound) if len(loss) else float("nan")
    return {f"loss_{name}": mean, f"loss_{name}_lo": low, f"loss_{name}_hi": high, f"clipped_loss_{name}": clipped}


def why(documents: int, promise: Promise) -> str:
    if documents < promise.documents_needed():
        needed = promise.documents_needed()
        return f"cannot certify with {documents} documents: needs at least {needed}, even if none loses anything"
    return "cannot certify: its safest threshold already loses too much"


def without(promise: Promise, why: str) -> dict[str, Any]:
    return {"threshold": np.nan, "status": "not certified", "error": why, "needed": promise.documents_needed()}


def documents_of(frame: "pd.DataFrame", full_depth: float, higher_is_better: bool) -> tuple[Documents, np.ndarray]:
    """The documents of a unit whose figures are kept, and their ids [M].

    Args:
        frame: the unit's rows by document; its uniform depths are among them.
        full_depth: what losses are against.
        higher_is_better: the direction of quality.
    """
    full = frame[(frame["policy"] == "fixed") & (frame["threshold"] == full_depth)]
    full = full.drop_duplicates("document").sort_values("document")
    counts = full["quality_count"].to_numpy(np.int64)
    scored, calibrates = counts > 0, (full["split"] == "calibration").to_numpy()
    return Documents(
        counts=counts,
        full=full["quality_sum"].to_numpy(np.float64),
        sign=1 if higher_is_better else -1,
        pilot=calibrates & scored,
        tested=np.zeros_like(scored),
        shown=~calibrates & scored,
    ), full["document"].to_numpy()


def certify_kept(
    points: "pd.DataFrame", own: "pd.DataFrame", ids: np.ndarray, documents: Documents, promise: Promise
) -> dict[str, Any] | None:
    """The fastest of a policy's kept points, tested on the test split, since calibration documents chose them.

    Args:
        points: the policy's rows of `points`, for the calibration figures that set the order.
        own: its rows by document, of one kind of evidence; None where it has none.
        ids: int64 [M], the documents in order.
        documents: the test split of them is tested.
        promise: what is certified.
    """
    known = points[(points["split"] == "calibration") & (points["subset"] == "all")]
    chosen_by = "replayed" if (known["evidence"] == "replayed").any() else "executed"
    known = known[known["evidence"] == chosen_by]
    known = known.drop_duplicates("threshold").set_index("threshold")
    thresholds = [threshold for threshold in own["threshold"].unique() if threshold in known.index]
    if not thresholds:
        return None
    order = np.argsort(ids)
    column = order[np.searchsorted(ids[order], own["document"])]
    row = own["threshold"].map({threshold: place for place, threshold in enumerate(thresholds)})
    kept = row.notna().to_numpy()
    at = row[kept].to_numpy(int), column[kept]
    sums = np.full((3, len(thresholds), len(ids)), np.nan)
    for each, name in zip(sums, ("quality_sum", "depth_sum", "n_tokens"), strict=True):
        each[at] = own[name][kept]
    quality, depth, tokens = sums
    ordered = known.loc[thresholds]
    order_loss = documents.sign * (ordered["quality_full_depth"] - ordered["quality"]).to_numpy()[:, None]
    loss = documents.loss(quality, documents.shown)
    best, p = fastest_certified(loss, order_loss, ordered["mean_depth"].to_numpy(), promise)
    found: dict[str, Any] = {"tested_on": "test", "n_documents": int(documents.shown.sum())}
    found |= {"p_value": p, "needed": promise.documents_needed()}
    if best is None:
        return found | without(promise, why(found["n_documents"], promise))
    found |= {"threshold": float(thresholds[best]), "status": "certified", "error": ""}
    if (own["evidence"] == chosen_by).all():
        found["mean_depth_calibration"] = float(ordered["mean_depth"].iloc[best])
    found["mean_depth_test"] = float(depth[best, documents.shown].sum() / tokens[best, documents.shown].sum())
    return found | losses("test", loss[best], promise)
