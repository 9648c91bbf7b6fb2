"""Every figure of a run at paper size, one a page of one PDF."""

import io

from halting_bench.errors import UserError
from halting_bench.reporting.drawing import our_look
from halting_bench.reporting.frames import drawn_pairs
from halting_bench.reporting.plots import PLOTS
from halting_bench.store import Run


def figures_pdf(run: Run) -> bytes:
    """The same bytes for the same run: the file holds no date. Raises UserError where nothing is finite: a PDF has a page."""
    from matplotlib.backends.backend_pdf import PdfPages

    if not drawn_pairs(run):
        raise UserError(f"{run.path} has nothing to draw, for no quality in it is finite: type halting-bench doctor MODEL")
    buffer, metadata = io.BytesIO(), {"CreationDate": None, "Title": "halting-bench"}
    with our_look(**{"pdf.fonttype": 42}), PdfPages(buffer, metadata=metadata) as pages:  # 42: text stays text
        for model, benchmark in drawn_pairs(run):
            for draw in PLOTS.values():
                figure = draw(run, model, benchmark)
                if figure is not None:
                    pages.savefig(figure)
    return buffer.getvalue()
