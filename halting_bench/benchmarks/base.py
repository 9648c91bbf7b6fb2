"""What a benchmark is: documents turned into sequences with a gold target at every scored position.

A document is the unit of statistics (splits and intervals are by document), a sequence the unit of one forward.
Shapes: T positions of a sequence.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from halting_bench.records import Metric

NOT_SCORED = -1


@dataclass(frozen=True)
class Sequence:
    """One forward's input and what is expected of it."""

    document: int  # id of the document it belongs to
    uid: int  # unique in the benchmark: seeds the initial state
    tokens: np.ndarray  # int64 [T]
    targets: np.ndarray  # int64 [T]: the token that the readout at this position must predict, or NOT_SCORED
    codes: dict[str, np.ndarray] = field(default_factory=dict)  # subset family -> int16 [T], index into its names, -1: none


@dataclass(frozen=True)
class Sample:
    """How much of a benchmark a sweep uses unless told otherwise: documents, and sequences drawn of each (None: all)."""

    documents: int
    sequences: int | None


class Direction(Enum):
    """What a scored position must be able to see, and what must be hidden from it."""

    EITHER = "either"  # its targets stand nowhere in the input, and any model may be asked
    LEFT = "left"  # the next token is the target: a model that sees both sides would read it off
    BOTH = "both"  # what is asked depends on what follows


class Benchmark(ABC):
    """A source of documents. It never calls the engine."""

    name: str
    metric: Metric
    direction: Direction = Direction.EITHER
    default_sample: Sample = Sample(256, None)
    executed_sample: Sample = Sample(32, 2)  # where every point is acted out instead of replayed from one pass
    subset_names: dict[str, tuple[str, ...]]  # subset family (level, class, position) -> names of its codes

    @abstractmethod
    def manifest(self) -> dict:
        """Everything that decides which documents there are and how they are scored (JSON-able; hashed into records)."""

    @abstractmethod
    def sample(self, limit: int | None, seed: int) -> list[int]:
        """Ids of the documents to use, in a seeded order; `None` for all there are."""

    @abstractmethod
    def sequences(self, document: int) -> list[Sequence]:
        """The sequences of one document: the same for the same id, always."""
