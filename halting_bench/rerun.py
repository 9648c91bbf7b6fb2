"""Making a run again, from what its manifest says was asked."""

import json
import shlex
from pathlib import Path

from halting_bench.catalog import show
from halting_bench.sweep_config import SweepConfig

_FLAGS = {"models": "--model", "benchmarks": "--benchmark", "policies": "--policy", "seeds": "--seed"}
_OWN = ("keep_trace", "plots", "like", "rules")
"""Settings that concern one run's output and say nothing of what was measured."""


def settings_of(manifest: dict) -> dict:
    """What a sweep like that run is asked unless it says otherwise. Whether to trust code is asked anew each time."""
    return {key: value for key, value in manifest["config"].items() if key not in (*_OWN, "trust_remote_code")}


def sweep_command(manifest: dict, out: Path, *extra: str) -> str:
    """A `halting-bench sweep` command line with every setting that is not the default.

    Args:
        manifest: of the run to make again.
        out: its run directory; the same directory resumes.
        extra: further arguments, such as `--keep-trace`.
    """
    asked, default = manifest["config"], show(SweepConfig())
    words = ["halting-bench", "sweep"]
    for key, value in asked.items():
        if key in _OWN or key not in default or value == default[key]:
            continue
        if key in _FLAGS and value is not None:
            words += [word for each in value for word in (_FLAGS[key], str(each))]
        elif isinstance(value, dict):
            for inner, given in value.items():
                if given != default[key].get(inner):
                    words += ["--set", f"{key}.{inner}={json.dumps(given)}"]
        else:
            words += ["--set", f"{key}={json.dumps(value)}"]
    return shlex.join([*words, *extra, "--out", str(out)])
