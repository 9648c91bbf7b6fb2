"""The table of a model's self-checks, for a terminal."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from halting_bench.doctor import Check

STYLES = {"pass": "green", "fail": "bold red", "info": "dim", "skip": "yellow"}


def print_checks(model: str, checks: Iterable["Check"], console: "Console") -> None:
    """One row a check: its verdict, its figure and limit, and what to know about it; never wider than the console."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    checks = list(checks)
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    grid.add_column("check", overflow="fold")
    grid.add_column("", width=4)
    grid.add_column("figure", justify="right", overflow="fold")
    grid.add_column("limit", justify="right")
    grid.add_column("note", overflow="fold", ratio=1)
    for check in checks:
        verdict = Text(check.verdict, style=STYLES[check.verdict])
        grid.add_row(check.name, verdict, f"{_number(check.figure)} {check.unit}".strip(), _number(check.limit), check.note)
    console.print(Text(f"Self-checks of {model}", style="bold"))
    console.print(grid)
    failed = sum(check.verdict == "fail" for check in checks)
    if failed:
        console.print(Text(f"{failed} failed: do not believe numbers from this model", style="bold red"))
    else:
        console.print(Text("numbers from this model may be believed", style="bold green"))


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"
