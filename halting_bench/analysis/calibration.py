"""Which thresholds keep a promise: Learn-then-Test with fixed-sequence testing (Angelopoulos et al., arXiv 2110.01052).

The risk of a threshold is the mean over documents of its quality loss against full depth, clipped to [0, B]. Each threshold
has the null hypothesis "my risk exceeds E"; they are tested one after the other, in an order that the tested documents did
not choose, until the first that cannot be rejected. All that were rejected hold at once with the stated confidence, so the
fastest of them may be picked. P-values are Hoeffding-Bentkus's (Bates et al., arXiv 2101.02703).

Shapes: G thresholds, M documents.
"""

import math
from dataclasses import dataclass

import numpy as np

from halting_bench.errors import UserError
from halting_bench.records import Metric

BOUND = {Metric.ACCURACY: 1.0, Metric.BITS_PER_BYTE: 0.5}
"""The largest loss of a document that counts, unless told otherwise, in the metric's own unit."""


@dataclass(frozen=True)
class Promise:
    """The mean loss of a document, clipped to [0, bound], is at most `max_loss` with probability `confidence`."""

    max_loss: float
    confidence: float
    bound: float

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise UserError(f"confidence {self.confidence} is not between 0 and 1: type --confidence 0.9")
        if not (self.max_loss > 0 and math.isfinite(self.max_loss)):
            raise UserError(f"max loss {self.max_loss} must be above 0: type --max-loss 0.01")
        if not (self.bound > self.max_loss and math.isfinite(self.bound)):
            raise UserError(
                f"bound {self.bound:g} must be above the max loss {self.max_loss:g}, or all thresholds keep it: type --bound B"
            )

    @property
    def level(self) -> float:
        """The tested level of the scaled risk, in (0, 1)."""
        return self.max_loss / self.bound

    @property
    def error(self) -> float:
        """The probability with which the promise may fail."""
        return 1 - self.confidence

    def shared(self, policies: int) -> "Promise":
        """The promise to make to each of several policies, so that the best of them, picked afterwards, keeps this one."""
        return Promise(self.max_loss, 1 - self.error / policies, self.bound)

    def documents_needed(self) -> int:
        """The fewest documents with which anything can be certified, reached when none of them loses anything."""
        return math.ceil(math.log(self.error) / math.log1p(-self.level))

    def risk(self, loss: np.ndarray) -> np.ndarray:
        """Losses as risks in [0, 1]; a loss that is not a number is the worst there is."""
        return np.clip(np.nan_to_num(loss, nan=self.bound, posinf=self.bound, neginf=0.0), 0, self.bound) / self.bound


def hoeffding_bentkus(risk: np.ndarray, documents: int, level: float) -> np.ndarray:
    """P-values of "the expected risk exceeds the level", valid at any sample size.

    Args:
        risk: [G] mean risks observed, in [0, 1].
        documents: how many each is the mean of.
        level: in (0, 1).
    """
    from scipy.special import rel_entr
    from scipy.stats import binom

    below = np.minimum(risk, level)
    hoeffding = np.exp(-documents * (rel_entr(below, level) + rel_entr(1 - below, 1 - level)))
    # A mean of k/n may come out as a hair above it; the ceiling must not jump to k + 1 for that.
    bentkus = math.e * binom.cdf(np.ceil(documents * risk - 1e-9), documents, level)
    return np.minimum(np.minimum(hoeffding, bentkus), 1.0)


def certified(risk: np.ndarray, promise: Promise) -> int:
    """How many thresholds are certified, from the first on. risk: [G, M] in testing order, scaled to [0, 1]."""
    documents = risk.shape[1]
    if documents == 0:
        return 0
    rejected = hoeffding_bentkus(risk.mean(axis=1), documents, promise.level) <= promise.error
    return len(rejected) if rejected.all() else int(rejected.argmin())


def testing_order(pilot_loss: np.ndarray, pilot_depth: np.ndarray, promise: Promise) -> np.ndarray:
    """Safest first, by the loss of documents that are not tested; of equals the deeper first.

    Args:
        pilot_loss: [G, P] losses of other documents.
        pilot_depth: [G] mean depth there.
        promise: how losses are clipped.
    """
    return np.lexsort((-pilot_depth, promise.risk(pilot_loss).mean(axis=1)))


def fastest_certified(
    loss: np.ndarray, pilot_loss: np.ndarray, pilot_depth: np.ndarray, promise: Promise
) -> tuple[int | None, float]:
    """The certified threshold of least pilot depth.

    Args:
        loss: [G, M] losses of the tested documents.
        pilot_loss: [G, P] losses of the documents that set the order.
        pilot_depth: [G] their mean depth.
        promise: what is certified.

    Returns:
        Its index, or None when nothing is certified; and its p-value, or that of the first threshold tested.
    """
    order = testing_order(pilot_loss, pilot_depth, promise)
    risk = promise.risk(loss)
    count = certified(risk[order], promise)
    best = int(order[:count][np.argmin(pilot_depth[order[:count]])]) if count else int(order[0])
    if loss.shape[1] == 0:
        return None, 1.0
    p = float(hoeffding_bentkus(risk[best : best + 1].mean(axis=1), loss.shape[1], promise.level)[0])
    return (best if count else None), p
