"""Procedural tasks with a label at every step of the computation: how much depth a position needs is known by construction.

Tokens are ASCII bytes; a sequence starts with its task's letter; a label is the byte that the readout at that position must
predict, and labels are never fed back as inputs, so every prefix is a prompt. Levels are bins of a position's difficulty; a
name that ends in `*` is beyond the trained range.

| task | tag | a position | its label | difficulty | chance |
|---|---|---|---|---|---|
| shell | S | a swap of two of five cups (a letter a-j) | the cup the ball is under | swaps so far | .20 |
| pancake | P | turn over the top 2-6 of six pancakes (a digit) | the marked one's place | turns so far | .17 |
| s3 | G | an element of the group S3 (a letter a-f) | the running product | factors so far | .17 |
| hop | H | a variable (letter) defined by a digit or an earlier variable | its digit | depth of the definition | .20 |
| add | A | a pair of digits, least significant first | the digit of the sum | length of the carry chain | ~.5 |

Shapes: B sequences, T tokens.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import ClassVar

import numpy as np

from halting_bench.benchmarks.base import NOT_SCORED, Benchmark, Sequence
from halting_bench.records import Metric

GENERATOR_VERSION = 1
DOCUMENTS = 2000
SEQUENCES_PER_DOCUMENT = 4
EVALUATION_STREAM = 0x6576  # training draws have another first word: the two never share a generator
_DIGIT, _LETTER = ord("0"), ord("a")

_CUPS = 5
_SWAPS = np.array(list(combinations(range(_CUPS), 2)))  # letter a is (0, 1), b (0, 2), ... j (3, 4)
_S3 = np.array(list(permutations(range(3))))  # letter a is the identity
_S3_INDEX = {tuple(row): index for index, row in enumerate(_S3.tolist())}
# _S3_PRODUCT[p, q]: first p, then q, i.e. position x goes to q[p[x]].
_S3_PRODUCT = np.array([[_S3_INDEX[tuple(q[p])] for q in _S3] for p in _S3])
_VARIABLES = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", np.uint8).astype(np.int64)


@dataclass(frozen=True)
class ProceduralTask(Benchmark, ABC):
    """A generated task. `bounds` are the largest difficulties of the levels; the first `trained` levels are trained on."""

    tag: ClassVar[str]
    chance: ClassVar[float]
    bounds: ClassVar[tuple[int, ...]]
    trained: ClassVar[int]

    seed: int = 0
    documents: int = DOCUMENTS
    metric = Metric.ACCURACY

    @property
    def subset_names(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        names, low = [], 1
        for index, high in enumerate(self.bounds):
            span = str(high) if low == high else f"{low}-{high}"
            names.append(span + ("*" if index >= self.trained else ""))
            low = high + 1
        return {"level": tuple(names)}

    @abstractmethod
    def length(self, level: int) -> int:
        """Tokens of a sequence of a level."""

    @abstractmethod
    def generate(self, level: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws sequences of which the hardest positions are of `level`.

        Returns:
            tokens, targets, difficulty: int64 [B, T]; a target is NOT_SCORED and a difficulty 0 where nothing is asked.
        """

    def batch(self, level: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `generate`, with each position's level (0-based; -1: not scored) in place of its difficulty."""
        tokens, targets, difficulty = self.generate(level, count, rng)
        levels = np.searchsorted(np.array(self.bounds), difficulty)
        return tokens, targets, np.where(targets == NOT_SCORED, -1, levels)

    def manifest(self) -> dict:
        return {
            "benchmark": self.name,
            "generator_version": GENERATOR_VERSION,
            "seed": self.seed,
            "documents": self.documents,
            "sequences_per_document": SEQUENCES_PER_DOCUMENT,
            "levels": list(self.subset_names["level"]),
            "chance": self.chance,
            "metric": self.metric.value,
        }

    def sample(self, limit: int | None, seed: int) -> list[int]:
        order = np.random.default_rng([EVALUATION_STREAM, seed]).permutation(self.documents)
        return order[: self.documents if limit is None else limit].tolist()

    def sequences(self, document: int) -> list[Sequence]:
        """Three sequences up to the hardest trained level and one beyond it (where the task has levels beyond)."""
        rng = np.random.default_rng([EVALUATION_STREAM, self.seed, ord(self.tag), document])
        out = []
        for index in range(SEQUENCES_PER_DOCUMENT):
            level = self.trained - 1 if index < SEQUENCES_PER_DOCUMENT - 1 else len(self.bounds) - 1
            tokens, targets, levels = self.batch(level, 1, rng)
            uid = document * SEQUENCES_PER_DOCUMENT + index
            out.append(Sequence(document, uid, tokens[0], targets[0], {"level": levels[0].astype(np.int16)}))
        return out

    def _frame(self, count: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = np.full((count, length), ord(self.tag), np.int64)
        return tokens, np.full((count, length), NOT_SCORED, np.int64), np.zeros((count, length), np.int64)


class Shell(ProceduralTask):
    """A ball under one of five cups. `S2aj...`: it starts under cup 2, cups 0 and 1 change places, then 3 and 4."""

    name, tag, chance = "shell", "S", 0.2
    bounds, trained = (2, 4, 6, 8, 10, 12, 16), 6

    def length(self, level: int) -> int:
        return 2 + self.bounds[level]

    def generate(self, level: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        swaps = self.bounds[level]
        tokens, targets, difficulty = self._frame(count, 2 + swaps)
        ball = rng.integers(_CUPS, size=count)
        choice = rng.integers(len(_SWAPS), size=(count, swaps))
        tokens[:, 1], tokens[:, 2:] = _DIGIT + ball, _LETTER + choice
        for step in range(swaps):
            first, second = _SWAPS[choice[:, step]].T
            ball = np.where(ball == first, second, np.where(ball == second, first, ball))
            targets[:, 2 + step] = _DIGIT + ball
        difficulty[:, 2:] = np.arange(1, swaps + 1)
        return tokens, targets, difficulty


class Pancake(ProceduralTask):
    """A marked pancake in a stack of six. `P352`: it is 3 from the top, 0-based; the top 5 are turned over, then the top 2."""

    name, tag, chance = "pancake", "P", 1 / 6
    bounds, trained = (2, 4, 6, 8, 10, 12, 16), 6
    size: ClassVar[int] = 6

    def length(self, level: int) -> int:
        return 2 + self.bounds[level]

    def generate(self, level: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        turns = self.bounds[level]
        tokens, targets, difficulty = self._frame(count, 2 + turns)
        place = rng.integers(self.size, size=count)
        turned = rng.integers(2, self.size + 1, size=(count, turns))
        tokens[:, 1], tokens[:, 2:] = _DIGIT + place, _DIGIT + turned
        for step in range(turns):
            top = turned[:, step]
            place = np.where(place < top, top - 1 - place, place)
            targets[:, 2 + step] = _DIGIT + place
        difficulty[:, 2:] = np.arange(1, turns + 1)
        return tokens, targets, difficulty


class S3(ProceduralTask):
    """The running product of permutations of three things. `Gbe...`: first b, then e; the label after e is their product."""

    name, tag, chance = "s3", "G", 1 / 6
    bounds, trained = (1, 2, 3, 4, 6, 8, 12), 6

    def length(self, level: int) -> int:
        return 1 + self.bounds[level]

    def generate(self, level: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        factors = self.bounds[level]
        tokens, targets, difficulty = self._frame(count, 1 + factors)
        choice = rng.integers(6, size=(count, factors))
        tokens[:, 1:] = _LETTER + choice
        product = np.zeros(count, np.int64)
        for step in range(factors):
            product = _S3_PRODUCT[product, choice[:, step]]
            targets[:, 1 + step] = _LETTER + product
        difficulty[:, 1:] = np.arange(1, factors + 1)
        return tokens, targets, difficulty


class Hop(ProceduralTask):
    """Variables defined in terms of earlier ones. `Hx7qxkq`: x is 7, q is x, k is q; a definition's label is its digit.

    A definition by a digit is one hop, by a variable one hop more than that variable's. Five chains of definitions (two
    to four on the easy levels), with different digits, grow interleaved: guessing among the digits seen gives a fifth.
    """

    name, tag, chance = "hop", "H", 0.2
    bounds, trained = (1, 2, 3, 4, 6, 8, 10), 6
    chains: ClassVar[tuple[int, ...]] = (2, 2, 2, 3, 4, 5, 5)  # by level: with fewer to choose from, a first step is found

    def definitions(self, level: int) -> int:
        """Definitions of a sequence of a level: all its chains in full, as far as there are letters."""
        return min(self.chains[level] * self.bounds[level], len(_VARIABLES))

    def length(self, level: int) -> int:
        return 1 + 2 * self.definitions(level)

    def generate(self, level: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        deepest, total, chains = self.bounds[level], self.definitions(level), self.chains[level]
        tokens, targets, difficulty = self._frame(count, self.length(level))
        names = rng.permuted(np.broadcast_to(_VARIABLES, (count, len(_VARIABLES))), axis=1)
        digits = rng.permuted(np.broadcast_to(_DIGIT + np.arange(10), (count, 10)), axis=1)[:, :chains]
        depth, end = np.zeros((count, chains), np.int64), digits.copy()
        priority = rng.random((count, total, chains))
        rows = np.arange(count)
        for step in range(total):
            chain = np.where(depth < deepest, priority[:, step], -1.0).argmax(axis=1)
            tokens[:, 1 + 2 * step], tokens[:, 2 + 2 * step] = names[:, step], end[rows, chain]
            end[rows, chain] = names[:, step]
            depth[rows, chain] += 1
            targets[:, 2 + 2 * step], difficulty[:, 2 + 2 * step] = digits[rows, chain], depth[rows, chain]
        return tokens, targets, difficulty


class Add(ProceduralTask):
    """Two numbers, digit by digit from the least significant, interleaved. `A5768`: 65 + 87; labels 2 after `57`, 5 after `68`.

    A position's difficulty is how many earlier pairs decide its carry: one more than the run of pairs just before it that
    sum to nine (and pass a carry on unchanged).
    """

    name, tag, chance = "add", "A", 0.5
    bounds, trained = (1, 2, 4, 6, 8, 10, 12), 6
    extra: ClassVar[int] = 5

    def length(self, level: int) -> int:
        return 1 + 2 * (self.bounds[level] + self.extra)

    def generate(self, level: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        longest = self.bounds[level]
        pairs = longest + self.extra
        tokens, targets, difficulty = self._frame(count, self.length(level))
        left = rng.integers(10, size=(count, pairs))
        other = rng.integers(10, size=(count, pairs))
        # A chain starts where the last one ended: its first pair does not sum to nine, the rest do. Half are as long as may be.
        remaining = np.zeros(count, np.int64)
        carry, chain = np.zeros(count, np.int64), np.zeros(count, np.int64)
        wanted = np.where(rng.random((count, pairs)) < 0.5, longest, rng.integers(1, longest + 1, size=(count, pairs)))
        for step in range(pairs):
            start = remaining == 0
            remaining = np.where(start, wanted[:, step], remaining) - 1
            nine = 9 - left[:, step]
            away = (nine + 1 + other[:, step] % 9) % 10  # any digit but `nine`
            right = np.where(start, away, nine)
            # Before this pair: the pair that starts a chain is one step back, and each nine in between adds one.
            difficulty[:, 2 + 2 * step] = np.maximum(chain, 1)
            total = left[:, step] + right + carry
            tokens[:, 1 + 2 * step], tokens[:, 2 + 2 * step] = _DIGIT + left[:, step], _DIGIT + right
            targets[:, 2 + 2 * step] = _DIGIT + total % 10
            carry = total // 10
            chain = np.where(start, 1, chain + 1)
        return tokens, targets, difficulty


TASKS: dict[str, type[ProceduralTask]] = {"shell": Shell, "pancake": Pancake, "s3": S3, "hop": Hop, "add": Add}
