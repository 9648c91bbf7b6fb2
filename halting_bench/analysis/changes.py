"""What differs between two runs besides their figures: what was asked, of which model and code, and on what machine."""

from collections.abc import Iterator
from typing import Any

from halting_bench.store import Run

_NOISE = ("environment.cpu.mhz", "environment.device.clocks")
_PARTS = ("config", "models", "benchmarks", "policies", "environment")
_NAMES = {"models": "model", "benchmarks": "benchmark", "policies": "name"}


def changes(base: Run, head: Run) -> list[tuple[str, str, str]]:
    """(what, baseline's value, head's value) of everything in the manifests that differs; "" where a side has none."""
    was, now = (dict(_flat(run.manifest)) for run in (base, head))
    return [
        (key, str(was.get(key, "")), str(now.get(key, "")))
        for key in dict.fromkeys((*was, *now))
        if was.get(key) != now.get(key) and not key.startswith(_NOISE)
    ]


def _flat(manifest: dict) -> Iterator[tuple[str, Any]]:
    for part in _PARTS:
        value = manifest.get(part)
        if part in _NAMES and isinstance(value, list):
            for each in value:
                # A benchmark's hash stands for its manifest, which may list hundreds of files.
                inner = {key: given for key, given in each.items() if key not in (_NAMES[part], "manifest", "source", "notes")}
                yield from _leaves(f"{part}.{each[_NAMES[part]]}", inner)
        else:
            yield from _leaves(part, value)


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{prefix}.{key}", inner)
    else:
        yield prefix, value
