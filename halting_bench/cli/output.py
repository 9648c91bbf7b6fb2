"""How commands print: data on stdout, everything else on stderr."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halting_bench.reporting.table import Table


def say(text: str) -> None:
    """A line for a person, on stderr."""
    print(text, file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_tables(tables: Sequence["Table"]) -> None:
    """Tables on stdout, as wide as the terminal (80 columns where there is none)."""
    import shutil

    from rich.console import Console

    from halting_bench.reporting.exports import render_rich

    console = Console(width=shutil.get_terminal_size((80, 24)).columns, highlight=False)
    for table in tables:
        render_rich(table, console)
