"""halting-bench report."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from halting_bench.cli.output import print_tables

FORMAT = "md, csv, tex, siunitx, json, html, pdf, github-benchmark or lm-eval. Default: the terminal."


def report(
    run: Annotated[Path, typer.Argument(help="A run directory that a sweep wrote.")],
    format: Annotated[str | None, typer.Option("--format", help=FORMAT)] = None,
    table: Annotated[str | None, typer.Option(help="Only tables whose name contains this.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write to this file, not to stdout.")] = None,
) -> None:
    """Print the tables of a run, or turn it into one document."""
    from halting_bench.reporting.formats import export_run, tables_named
    from halting_bench.store import load_run, write_bytes

    if format is None:
        print_tables(tables_named(load_run(run), table))
    elif out is not None:
        write_bytes(out, export_run(load_run(run), format, table))
    else:
        sys.stdout.buffer.write(export_run(load_run(run), format, table))
