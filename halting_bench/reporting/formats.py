"""Every format of a report: those that list tables, and those that hold a whole run."""

from collections.abc import Callable

from halting_bench.errors import UserError, unknown_name
from halting_bench.reporting.benchmark_json import github_benchmark, lm_eval_results
from halting_bench.reporting.exports import FORMATS, render_all
from halting_bench.reporting.html import report_page
from halting_bench.reporting.pdf import figures_pdf
from halting_bench.reporting.siunitx import render_siunitx
from halting_bench.reporting.table import Table
from halting_bench.reporting.tables import summary_tables
from halting_bench.store import Run

RUN_FORMATS: dict[str, Callable[[Run], bytes]] = {
    "html": lambda run: report_page(run).encode(),
    "pdf": figures_pdf,
    "github-benchmark": lambda run: github_benchmark(run).encode(),
    "lm-eval": lambda run: lm_eval_results(run).encode(),
}


def tables_named(run: Run, part: str | None) -> list[Table]:
    """The tables whose names contain `part`; None: all. Raises UserError when there is none."""
    tables = summary_tables(run)
    chosen = [table for table in tables if part is None or part in table.name]
    if not chosen:
        raise UserError(f"no table's name contains '{part}'; there are: {', '.join(table.name for table in tables)}")
    return chosen


def export_run(run: Run, format: str, part: str | None = None) -> bytes:
    """A run in one document.

    Args:
        run: what is reported.
        format: of `FORMATS`, `siunitx`, or `RUN_FORMATS`.
        part: only tables whose names contain this.

    Raises:
        UserError: a format that there is not, or a part of one that has no tables.
    """
    if format in RUN_FORMATS:
        if part is not None:
            raise UserError(f"--format {format} holds the whole run: leave --table out")
        return RUN_FORMATS[format](run)
    if format == "siunitx":
        return "\n".join(map(render_siunitx, tables_named(run, part))).encode()
    if format not in FORMATS:
        raise unknown_name("format", format, [*FORMATS, "siunitx", *RUN_FORMATS])
    return render_all(tables_named(run, part), format).encode()
