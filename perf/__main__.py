"""`make perf`: every figure that the project promises, measured; results/perf.json and a table of it.

    python -m perf [NAME ...]

Names select modules (see MODULES). Each runs in a process of its own, one after the other, so that none warms, slows or
breaks another; what failed, was cut by the time limit, or needs a device that is not here, is listed with no value.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from perf.figure import figure

MODULES = {
    "sweep": "perf.sweep_figures",
    "replay": "perf.replay_figures",
    "models": "perf.model_figures",
    "scoring": "perf.runtime_scoring",
    "decoding": "perf.runtime_decoding",
    "lm-eval": "perf.lm_eval_figures",
    "load": "perf.load_memory",
    "decide": "perf.decide_scale",
    "gpu": "perf.gpu_figures",
}
"""What can be measured -> the module whose `measurements()` does it."""

LIMIT_S = 44 * 60  # of everything together
OUT = Path("results") / "perf.json"
_CHILD = "import importlib, json, sys; print(json.dumps(importlib.import_module(sys.argv[1]).measurements()))"


def command_of(name: str) -> str:
    return f"python -m perf {name}"


def read() -> list[dict[str, Any]]:
    """What was measured before; of the modules that run now it is replaced."""
    rows: list[dict[str, Any]] = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else []
    return rows


def measure(name: str, left: float) -> list[dict[str, Any]]:
    """The figures of one module; one row without a value when it has none to give."""
    why = f"the limit of {LIMIT_S // 60} minutes was reached"
    if left > 0:
        try:
            argv = [sys.executable, "-c", _CHILD, MODULES[name]]
            done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=left, check=True)
            return [row | {"command": command_of(name)} for row in json.loads(done.stdout.splitlines()[-1])]
        except subprocess.TimeoutExpired:
            pass
        except (subprocess.CalledProcessError, ValueError, IndexError) as error:
            why = f"it failed ({error})"
    return [figure(f"{name}: not measured, {why}", None, "", None, command_of(name))]


def show(rows: list[dict[str, Any]]) -> None:
    """The figures as a table, 80 columns wide."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, width=80)
    table.add_column("figure", overflow="fold")
    for name in ("value", "target", "holds"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        value = "–" if row["value"] is None else f"{row['value']:.4g} {row['unit']}"
        table.add_row(row["name"], value, str(row["target"] or ""), {None: "", True: "yes", False: "NO"}[row["holds"]])
    Console(width=80, highlight=False).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m perf", description="Measure what the project promises.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(MODULES)}; all of them by default")
    chosen = parser.parse_args().names or list(MODULES)
    unknown = [name for name in chosen if name not in MODULES]
    if unknown:
        parser.error(f"unknown name '{unknown[0]}': known are {', '.join(MODULES)}")
    deadline = time.monotonic() + LIMIT_S
    others = [row for row in read() if row["command"] not in map(command_of, chosen)]
    rows: list[dict[str, Any]] = []
    for name in chosen:
        print(f"measuring {name} ...", file=sys.stderr)
        rows += measure(name, deadline - time.monotonic())
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps([*others, *rows], indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    show(rows)


if __name__ == "__main__":
    main()
