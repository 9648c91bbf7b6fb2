"""What a result is: plain frozen data, JSON-able, keyed by the sha256 of its resolved fields. Imports no torch."""

import hashlib
import json
from enum import Enum, IntEnum
from typing import Protocol

SCHEMA_VERSION = 1


class Outcome(IntEnum):
    """How a row ended. HALTED: the rule fired before the cap; EXHAUSTED: it ran to the cap; NONFINITE: its state broke."""

    HALTED = 0
    EXHAUSTED = 1
    NONFINITE = 2


class Judged(Protocol):
    """What choosing points must know of a metric, ours or a task's own."""

    @property
    def higher_is_better(self) -> bool: ...

    @property
    def tolerance(self) -> float: ...


class Metric(Enum):
    """A mean over scored tokens of a per-token outcome."""

    ACCURACY = "accuracy"
    BITS_PER_BYTE = "bits_per_byte"

    @property
    def higher_is_better(self) -> bool:
        return self is Metric.ACCURACY

    @property
    def tolerance(self) -> float:
        """How much worse than full depth still counts as equal quality, in the metric's own unit."""
        return {Metric.ACCURACY: 0.002, Metric.BITS_PER_BYTE: 0.005}[self]


def digest(value: object) -> str:
    """The sha256 (first 16 hex digits) of a JSON-able value with sorted keys: the identity of a resolved choice."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


POINT_COLUMNS: dict[str, str] = {
    "run_id": "string",
    "model": "string",
    "model_hash": "string",
    "benchmark": "string",
    "subset": "string",  # "all", or "family:name" such as "level:1-2" or "class:digits"
    "metric": "string",
    "higher_is_better": "bool",
    "policy": "string",
    "threshold": "float64",  # NaN where the policy has none
    "params": "string",  # JSON of whatever else the policy was told
    "scope": "string",  # token or sequence
    "hits": "int64",
    "min_steps": "int64",
    "max_steps": "int64",
    "prefill": "string",
    "kv_mode": "string",
    "evidence": "string",  # replayed or executed
    "split": "string",  # calibration or test
    "seed": "int64",
    "dtype": "string",
    "n_documents": "int64",
    "n_tokens": "int64",
    "mean_depth": "float64",  # core applications a scored token
    "depth_per_loop": "string",  # JSON list
    "depth_p50": "float64",
    "depth_p95": "float64",
    "exhausted_fraction": "float64",
    "never_fired_fraction": "float64",
    "nonfinite_fraction": "float64",
    "quality": "float64",
    "quality_lo": "float64",  # 95 % interval over documents
    "quality_hi": "float64",
    "quality_full_depth": "float64",  # uniform depth at the trained mean, same rows
    "core_steps": "int64",
    "readouts": "int64",
    "flops_per_token": "float64",
    "role": "string",  # "grid" (from the recipe), "iso" (least depth of equal quality on calibration), "control"
    "on_front": "bool",
    "distinct": "bool",
    "status": "string",  # ok, not_applicable, failed
    "error": "string",
}
"""The columns of points.parquet and their pandas dtypes, in order (float64 is nullable as NaN, string as "")."""
