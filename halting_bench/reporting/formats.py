"""Every format that holds a whole run: what `report --format` knows besides the formats of a table."""

from collections.abc import Callable

from halting_bench.errors import unknown_name
from halting_bench.reporting.benchmark_json import github_benchmark, lm_eval_results
from halting_bench.reporting.exports import FORMATS, render_all
from halting_bench.reporting.html import report_page
from halting_bench.reporting.pdf import figures_pdf
from halting_bench.reporting.siunitx import render_siunitx
from halting_bench.reporting.tables import summary_tables
from halting_bench.store import Run

RUN_FORMATS: dict[str, Callable[[Run], bytes]] = {
    "html": lambda run: report_page(run).encode(),
    "pdf": figures_pdf,
    "siunitx": lambda run: "\n".join(map(render_siunitx, summary_tables(run))).encode(),
    "github-benchmark": lambda run: github_benchmark(run).encode(),
    "lm-eval": lambda run: lm_eval_results(run).encode(),
}


def export_run(run: Run, format: str) -> bytes:
    """The whole run in one document. Raises UserError for a format that there is not."""
    if format in RUN_FORMATS:
        return RUN_FORMATS[format](run)
    if format in FORMATS:
        return render_all(summary_tables(run), format).encode()
    raise unknown_name("format", format, [*FORMATS, *RUN_FORMATS])
