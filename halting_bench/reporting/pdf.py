"""Every figure of a run at paper size, one a page of one PDF."""

import io
from typing import Any

from halting_bench.reporting.frames import pairs
from halting_bench.reporting.plots import PLOTS
from halting_bench.reporting.style import RC
from halting_bench.store import Run


def figures_pdf(run: Run) -> bytes:
    """The same bytes for the same run: the file holds no date."""
    import matplotlib
    from matplotlib.backends.backend_pdf import PdfPages

    settings: Any = {**matplotlib.rcParamsDefault, **RC, "backend": "agg", "pdf.fonttype": 42}  # 42: text stays text
    buffer = io.BytesIO()
    with matplotlib.rc_context(settings), PdfPages(buffer, metadata={"CreationDate": None, "Title": "halting-bench"}) as pages:
        for model, benchmark in pairs(run):
            for draw in PLOTS.values():
                figure = draw(run, model, benchmark)
                if figure is not None:
                    pages.savefig(figure)
    return buffer.getvalue()
