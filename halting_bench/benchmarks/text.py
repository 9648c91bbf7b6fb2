"""Bits per byte over a list of documents, window by window.

The inputs of a document are its beginning-of-document token followed by all its tokens but the last; its targets are all
its tokens, so the first one is scored too. Windows of `window` positions start every `stride` positions; a position that
the window before has scored is context only, so each token is scored exactly once, with what context its window gives.

Shapes: N tokens of a document, T positions of a window.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from halting_bench.benchmarks.base import NOT_SCORED, Benchmark, Direction, Sample, Sequence
from halting_bench.benchmarks.classes import CLASS_NAMES, class_codes
from halting_bench.errors import UserError
from halting_bench.records import Metric

WINDOW, STRIDE = 256, 192
POSITION_EDGES = (16, 64, 256, 1024)
POSITION_NAMES = ("0-15", "16-63", "64-255", "256-1023", "1024+")


@dataclass(frozen=True)
class Tokens:
    """A tokenized document. ids: int64 [N]; byte_counts: int64 [N], the bytes that each token stands for."""

    ids: np.ndarray
    byte_counts: np.ndarray


@dataclass(frozen=True)
class Encoding:
    """How a model reads text. The default is one token a byte, with NUL before the first."""

    name: str
    start: int  # the beginning-of-document token
    encode: Callable[[bytes], Tokens]


def _encode_bytes(text: bytes) -> Tokens:
    ids = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    return Tokens(ids, np.ones_like(ids))


BYTES = Encoding("bytes", 0, _encode_bytes)


class DocumentBenchmark(Benchmark):
    """Bits per byte of a list of documents; what is asked of their bytes is the subclass's."""

    metric = Metric.BITS_PER_BYTE
    default_sample = Sample(96, 1)
    executed_sample = Sample(12, 1)

    def __init__(self, name: str, documents: list[bytes], source: dict, notes: tuple[str, ...]):
        """
        Args:
            name: as the user types it.
            documents: UTF-8 text, none empty.
            source: where the documents came from; JSON-able, a part of the manifest.
            notes: what was left out, for the user to read.
        """
        self.name = name
        self.notes = notes
        self._documents = documents
        self._source = source

    @abstractmethod
    def read_by(self, encoding: Encoding, max_length: int) -> "DocumentBenchmark":
        """The same documents for a model with that tokenizer, in windows that it can hold (then it is another benchmark).

        Raises:
            UserError: such a model cannot be asked.
        """

    def __len__(self) -> int:
        return len(self._documents)

    def document(self, document: int) -> bytes:
        """The text of a document: bits per byte divides by its length, whatever the tokenizer."""
        return self._documents[document]

    def contents(self) -> dict:
        """What a manifest says of the documents."""
        return {
            "metric": self.metric.value,
            "source": self._source,
            "documents": len(self._documents),
            "bytes": sum(map(len, self._documents)),
        }

    def sample(self, limit: int | None, seed: int) -> list[int]:
        if limit is not None and limit < 1:
            raise UserError(f"limit {limit} of benchmark '{self.name}' must be at least 1: type --limit N, or --limit all")
        order = sorted(range(len(self)), key=lambda document: hashlib.sha256(f"{seed}/{document}".encode()).digest())
        return order[:limit]


class TextBenchmark(DocumentBenchmark):
    """Each token predicted from those before it."""

    direction = Direction.LEFT
    subset_names = {"class": CLASS_NAMES, "position": POSITION_NAMES}  # noqa: RUF012 - declared by Benchmark

    def __init__(
        self,
        name: str,
        documents: list[bytes],
        source: dict,
        notes: tuple[str, ...] = (),
        *,
        window: int = WINDOW,
        stride: int = STRIDE,
        encoding: Encoding = BYTES,
    ):
        """
        Args:
            name, documents, source, notes: see `DocumentBenchmark`.
            window: positions of one forward.
            stride: positions between the starts of two windows.
            encoding: the model's tokenizer.

        Raises:
            UserError: the windows would leave bytes out.
        """
        super().__init__(name, documents, source, notes)
        if not 0 < stride <= window:
            raise UserError(f"benchmark '{name}' has stride {stride}, window {window}: type a stride from 1 to the window")
        self._window, self._stride, self._encoding = window, stride, encoding

    def read_by(self, encoding: Encoding, max_length: int) -> "TextBenchmark":
        window = min(self._window, max_length)
        stride = self._stride if window == self._window else max(1, window * self._stride // self._window)
        return TextBenchmark(
            self.name, self._documents, self._source, self.notes, window=window, stride=stride, encoding=encoding
        )

    def manifest(self) -> dict:
        return self.contents() | {
            "window": self._window,
            "stride": self._stride,
            "encoding": self._encoding.name,
            "first_token": f"scored, after token {self._encoding.start}",
        }

    def sequences(self, document: int) -> list[Sequence]:
        text = self._documents[document]
        tokens = self._encoding.encode(text)
        inputs = np.concatenate(([self._encoding.start], tokens.ids[:-1]))
        offsets = np.cumsum(tokens.byte_counts) - tokens.byte_counts  # where each token begins, in bytes
        codes = {
            "class": class_codes(np.frombuffer(text, dtype=np.uint8)[offsets]),
            "position": np.searchsorted(POSITION_EDGES, offsets, side="right").astype(np.int16),
        }
        windows: list[Sequence] = []
        scored = 0
        while scored < len(inputs):
            start = len(windows) * self._stride
            part = slice(start, start + self._window)
            targets = tokens.ids[part].copy()
            targets[: scored - start] = NOT_SCORED
            windows.append(
                Sequence(
                    document=document,
                    uid=document << 32 | len(windows),
                    tokens=inputs[part],
                    targets=targets,
                    codes={family: np.where(targets == NOT_SCORED, -1, code[part]) for family, code in codes.items()},
                )
            )
            scored = start + len(targets)
        return windows
