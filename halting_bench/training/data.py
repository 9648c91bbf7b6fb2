"""Training batches: each a pure function of (recipe, seed, step, curriculum), so that a resumed run draws the same ones.

Shapes: B sequences, T positions.
"""

from dataclasses import dataclass, field

import numpy as np

from halting_bench.benchmarks.base import NOT_SCORED
from halting_bench.benchmarks.masked import MASK, hidden_runs
from halting_bench.benchmarks.tasks import TASKS
from halting_bench.training.corpus import Corpus
from halting_bench.training.recipe import CORPUS_TASKS, Recipe

TRAINING_STREAM = 0x7261  # keeps training draws apart from evaluation documents, which have streams of their own
HELD_OUT_TOKENS = 2048


@dataclass
class Batch:
    """tokens, targets: int64 [B, T] (a target is NOT_SCORED where none); hardest: bool [B, T], positions of the level's own."""

    source: str
    level: int
    tokens: np.ndarray
    targets: np.ndarray
    hardest: np.ndarray


@dataclass
class Progress:
    """Where the curriculum stands: per task the current level and the running accuracy on it."""

    level: dict[str, int] = field(default_factory=dict)
    score: dict[str, float] = field(default_factory=dict)


class Mixture:
    """Draws the batches of a recipe."""

    def __init__(self, recipe: Recipe, corpus: Corpus | None):
        self.recipe, self.corpus = recipe, corpus
        weights = np.array([part.weight for part in recipe.mixture])
        self.names = [part.task for part in recipe.mixture]
        self.share = weights / weights.sum()
        self.tasks = {name: TASKS[name]() for name in self.names if name not in CORPUS_TASKS}

    def start(self) -> Progress:
        return Progress(dict.fromkeys(self.tasks, 0), dict.fromkeys(self.tasks, 0.0))

    def draw(self, rng: np.random.Generator, progress: Progress) -> list[Batch]:
        """One batch of each part; their tokens are in the proportion of the weights."""
        rng.random()  # the place of a draw that no longer decides anything: the bundled recipes count on the order of draws
        return [self._one(name, share, rng, progress) for name, share in zip(self.names, self.share, strict=True)]

    def _one(self, name: str, share: float, rng: np.random.Generator, progress: Progress) -> Batch:
        tokens = round(share * self.recipe.batch_tokens)
        if name in CORPUS_TASKS:
            return self.corpus_batch(name, rng, self._text().train, tokens)
        current = progress.level[name]
        level = current if current == 0 or rng.random() < self.recipe.curriculum.current else int(rng.integers(current))
        return self.task(name, level, rng, tokens)

    def task(self, name: str, level: int, rng: np.random.Generator, token_count: int) -> Batch:
        task = self.tasks[name]
        count = max(1, token_count // task.length(level))
        tokens, targets, levels = task.batch(level, count, rng)
        return Batch(name, level, tokens, targets, levels == level)

    def corpus_batch(self, name: str, rng: np.random.Generator, stream: np.ndarray, token_count: int) -> Batch:
        """Windows of a stream of the corpus, asked for their next bytes (`text`) or for those that are hidden (`masked`)."""
        window = self.recipe.window
        count = max(1, token_count // window)
        every = np.ones((count, window), bool)
        if name == "text":
            rows = self._windows(rng, stream, count, window + 1)
            return Batch(name, 0, rows[:, :-1], rows[:, 1:], every)
        rows = self._windows(rng, stream, count, window)
        hidden = np.stack([hidden_runs(window, rng) >= 0 for _ in range(count)]) & (rows != 0)  # no document begins hidden
        return Batch(name, 0, np.where(hidden, MASK, rows), np.where(hidden, rows, NOT_SCORED), every)

    def _windows(self, rng: np.random.Generator, stream: np.ndarray, count: int, length: int) -> np.ndarray:
        """int64 [count, length], drawn from anywhere or from where a training document starts."""
        last = stream.size - length
        offsets = rng.integers(last + 1, size=count)
        starts = self._text().starts
        at_start = rng.random(count) < self.recipe.document_start
        if stream is self._text().train:
            snapped = starts[np.searchsorted(starts, offsets, side="right") - 1]
            offsets = np.where(at_start, snapped, offsets)
        return stream[offsets[:, None] + np.arange(length)].astype(np.int64)

    def held_out(self, name: str) -> Batch:
        """The fixed batch that the log's losses by depth are taken on: the hardest trained level, or held-out documents."""
        rng = np.random.default_rng([TRAINING_STREAM, 1, self.names.index(name)])
        if name in CORPUS_TASKS:
            return self.corpus_batch(name, rng, self._text().held_out, HELD_OUT_TOKENS)
        return self.task(name, self.tasks[name].trained - 1, rng, HELD_OUT_TOKENS)

    def _text(self) -> Corpus:
        if self.corpus is None:
            raise ValueError("this mixture has no corpus")
        return self.corpus

    def learn(self, progress: Progress, batch: Batch, correct: np.ndarray, loops: int) -> None:
        """Moves the curriculum after a step. correct: bool [B, T]."""
        rules = self.recipe.curriculum
        if batch.source in CORPUS_TASKS or batch.level != progress.level[batch.source] or loops < rules.min_loops:
            return
        name = batch.source
        accuracy = float(correct[batch.hardest].mean())
        progress.score[name] = rules.memory * progress.score[name] + (1 - rules.memory) * accuracy
        if progress.score[name] > rules.raise_at and progress.level[name] < self.tasks[name].trained - 1:
            progress.level[name] += 1
            progress.score[name] = 0.0
