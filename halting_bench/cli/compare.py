"""halting-bench compare."""

from pathlib import Path
from typing import Annotated

import typer

from halting_bench.cli.output import print_tables


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two run directories or more; each is compared to the first.")],
    format: Annotated[str | None, typer.Option("--format", help="md, csv, tex, json or html. Default: the terminal.")] = None,
) -> None:
    """Set runs side by side, paired by document: any model, commit or machine."""
    from halting_bench.reporting.comparison import comparison_tables
    from halting_bench.reporting.exports import render_all
    from halting_bench.reporting.html import tables_page
    from halting_bench.store import load_run

    tables = comparison_tables([load_run(run) for run in runs])
    if format is None:
        print_tables(tables)
    elif format == "html":
        print(tables_page("halting-bench: comparison", tables), end="")
    else:
        print(render_all(tables, format), end="")
