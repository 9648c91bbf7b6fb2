"""Writes everything there is to read about a run: each table in every format, one document with all of them, the plots."""

from pathlib import Path

from halting_bench.reporting.exports import FORMATS, render, render_all
from halting_bench.reporting.plots import write_plots
from halting_bench.reporting.tables import summary_tables
from halting_bench.store import Run, write_bytes


def write_all(run: Run, folder: Path, *, plots: bool = True) -> list[Path]:
    """Writes `tables/` and `plots/` into a folder.

    `tables/report.md` holds every table in order, the summary first; beside it lies each table as `<name>.md`, `.csv`,
    `.tex` and `.json`.

    Returns:
        The files written.

    Raises:
        UserError: a file cannot be written.
    """
    tables = summary_tables(run)
    texts = {f"{table.name}.{format}": render(table, format) for table in tables for format in FORMATS}
    texts["report.md"] = render_all(tables, "md")
    written = []
    for name, text in texts.items():
        path = folder / "tables" / name
        write_bytes(path, text.encode())
        written.append(path)
    return written + (write_plots(run, folder / "plots") if plots else [])
