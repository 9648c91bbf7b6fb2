"""halting-bench report."""

from pathlib import Path
from typing import Annotated

import typer

from halting_bench.cli.output import print_tables
from halting_bench.errors import UserError


def report(
    run: Annotated[Path, typer.Argument(help="A run directory that a sweep wrote.")],
    format: Annotated[str | None, typer.Option("--format", help="md, csv, tex or json. Default: the terminal.")] = None,
    table: Annotated[str | None, typer.Option(help="Only tables whose name contains this.")] = None,
) -> None:
    """Print every table of a run."""
    from halting_bench.reporting.exports import render_all
    from halting_bench.reporting.tables import summary_tables
    from halting_bench.store import load_run

    tables = summary_tables(load_run(run))
    chosen = [each for each in tables if table is None or table in each.name]
    if not chosen:
        raise UserError(f"no table's name contains '{table}'; there are: {', '.join(each.name for each in tables)}")
    if format is None:
        print_tables(chosen)
    else:
        print(render_all(chosen, format), end="")
