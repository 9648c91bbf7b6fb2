"""lm-eval's results dictionary: its metrics, what must not pass for a score, and its form on disk. Imports no lm-eval."""

import hashlib
import math
from typing import Any

import numpy as np

from halting_bench.benchmarks.asks import Answer
from halting_bench.errors import UserError


def metrics_of(results: dict[str, Any], name: str) -> dict[str, float]:
    """`metric,filter` -> value, of a task or group, in the task's own order."""
    found = results["results"].get(name, {})
    return {key: value for key, value in found.items() if "," in key and "_stderr," not in key and not isinstance(value, str)}


def first_broken(answers: dict[int, list[Answer]]) -> int | None:
    """The index of a question whose answer is not a number, or None. lm-eval's argmax would not notice."""
    for number, found in answers.items():
        for value in found:
            loss = value[0] if isinstance(value, tuple) else value
            if isinstance(loss, float) and math.isnan(loss):
                return number
    return None


def check_finite(results: dict[str, Any]) -> None:
    """Raises UserError for a metric that is not a number: a result that says nothing must not pass for one."""
    for name in results["results"]:
        for key, value in metrics_of(results, name).items():
            if math.isnan(value):
                raise UserError(f"task '{name}': {key} is not a number: no document counts for it; raise --limit")


def jsonable(value: Any) -> Any:
    """Plain JSON types only; a number that is none becomes null, any other object its text, as lm-eval writes it."""
    if isinstance(value, dict):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [jsonable(inner) for inner in value]
    if isinstance(value, np.generic):
        return jsonable(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _texts(value: Any) -> Any:
    return [_texts(inner) for inner in value] if isinstance(value, (list, tuple)) else str(value)


def logged_sample(sample: dict[str, Any]) -> dict[str, Any]:
    """One document's samples record in the form of lm-eval's files, which its own tools and `datasets` read."""
    arguments = {
        f"gen_args_{i}": {f"arg_{j}": part for j, part in enumerate(args)} for i, args in enumerate(sample["arguments"])
    }
    texts = {name: _texts(sample[name]) for name in ("resps", "filtered_resps")}
    written: dict[str, Any] = jsonable(sample | texts | {"arguments": arguments, "target": str(sample["target"])})
    return written


def task_hashes(samples: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """lm-eval's identity of what each task asked."""
    return {
        task: hashlib.sha256("".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in records).encode()).hexdigest()
        for task, records in samples.items()
    }
