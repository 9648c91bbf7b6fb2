"""lm-eval tasks as a benchmark of a sweep: its documents are the tasks' documents, its sequences their questions."""

import hashlib
import importlib.metadata
from collections import Counter
from collections.abc import Sequence as Several
from pathlib import Path

import numpy as np

from halting_bench.benchmarks.asks import USUAL_LENGTH, Encoded, encode_scoring
from halting_bench.benchmarks.base import Benchmark, Sample, Sequence
from halting_bench.benchmarks.lm_eval_bridge import Suite
from halting_bench.benchmarks.lm_eval_index import is_file, prepare
from halting_bench.benchmarks.tokenizer import Tokenizer
from halting_bench.records import Metric

PREFIX = "lm-eval:"
_ORDER_STREAM = 0x6C6D  # which documents calibrate


class LmEvalBenchmark(Benchmark):
    """Loaded when it is first sampled. `metric` is of single tokens; the tasks' own metrics are scored by task_sweep."""

    metric = Metric.ACCURACY
    default_sample = Sample(256, None)
    subset_names: dict[str, tuple[str, ...]] = {}  # noqa: RUF012 - declared by Benchmark

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        max_length: int,
        *,
        include_path: Path | None = None,
        num_fewshot: int | None = None,
        offline: bool = False,
    ):
        """
        Args:
            name: `lm-eval:TASK[,TASK...]`, each a task, group, tag or YAML file. A file's place is no part of the
                benchmark's own name: runs of two machines compare.
            tokenizer: the model's.
            max_length: positions that the model has.
            include_path: a folder with more task files.
            num_fewshot: examples before each question, where the task does not forbid them.
            offline: make no request to the hub.
        """
        prepare(offline=offline)
        self.name = PREFIX + ",".join(Path(each).stem if is_file(each) else each for each in _asked(name))
        self.tokenizer, self.max_length = tokenizer, min(max_length, USUAL_LENGTH)
        self._names = _asked(name)
        self._include_path, self._num_fewshot = include_path, num_fewshot
        self._limit: int | None = None
        self._suite: Suite | None = None

    @property
    def suite(self) -> Suite:
        """The loaded tasks; all their documents when nothing has been sampled yet."""
        if self._suite is None:
            self._load(None)
        if self._suite is None:
            raise RuntimeError("loading leaves a suite")
        return self._suite

    def _load(self, limit: int | None) -> None:
        suite = Suite(self._names, include_path=self._include_path, limit=limit, num_fewshot=self._num_fewshot)
        self.encoded: Encoded = encode_scoring(suite.asks, self.tokenizer, self.max_length)
        self._suite, self._limit = suite, limit
        self._by_document: dict[int, list[Sequence]] = {}
        for sequence in self.encoded.sequences:
            self._by_document.setdefault(sequence.document, []).append(sequence)

    def manifest(self) -> dict:
        suite = self.suite
        tasks = {n: {"version": task.VERSION, "num_fewshot": task.config.num_fewshot} for n, task in suite.tasks.items()}
        asked = hashlib.sha256("\0".join(repr(ask) for ask in suite.asks).encode())
        return {
            "lm_eval": importlib.metadata.version("lm-eval"),
            "tasks": tasks,
            "limit": self._limit,
            "documents": dict(Counter(task for task, _ in suite.documents)),
            "questions": len(suite.asks),
            "questions_sha256": asked.hexdigest(),
            "encoding": self.tokenizer.encoding().name,
            "max_length": self.max_length,
            "truncated_questions": self.encoded.truncated_asks,
            "dropped_tokens": self.encoded.dropped_tokens,
        }

    def sample(self, limit: int | None, seed: int) -> list[int]:
        """The first `limit` documents of each task, as lm-eval limits them, in a seeded order."""
        if self._suite is None or limit != self._limit:
            self._load(limit)
        order: list[int] = np.random.default_rng([_ORDER_STREAM, seed]).permutation(len(self.suite.documents)).tolist()
        return order

    def sequences(self, document: int) -> list[Sequence]:
        """The questions of a document that are scored; those that generate have no sequence."""
        return self._by_document.get(document, [])


def _asked(name: str) -> list[str]:
    return name.removeprefix(PREFIX).split(",")


def numbered(suite: Suite, documents: Several[int]) -> np.ndarray:
    """The sampled place of each document number, int64 [M]."""
    place = np.empty(len(suite.documents), np.int64)
    place[np.array(documents)] = np.arange(len(documents))
    return place
