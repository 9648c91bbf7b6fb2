"""The picture of measured time: quality over milliseconds a token, a panel for each way of timing."""

from typing import TYPE_CHECKING

from halting_bench.reporting.frames import POINT, is_control, of_pair, select
from halting_bench.reporting.panels import Margin, figure_of, key_below, log_ticks
from halting_bench.reporting.style import COLOURS, MARKERS, UNIFORM_LINE
from halting_bench.reporting.text import metric_label
from halting_bench.store import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def quality_against_latency(run: Run, model: str, benchmark: str) -> "Figure | None":
    """The points that were timed, with p10 to p90, and uniform depth; None when none was.

    Quality is that of the point on the test documents, as its evidence has it: a point that loses quality when it acts is
    seen in the table of points acted out.
    """
    timed = of_pair(run.latency, model, benchmark)
    if timed.empty:
        return None
    points = select(of_pair(run.points, model, benchmark), "test")
    timed = timed[timed["status"] == "ok"].merge(points[[*POINT, "quality"]], on=POINT)
    if timed.empty:
        return None
    evidence, metric = points["evidence"].iloc[0], metric_label(*points[["metric", "higher_is_better"]].iloc[0])
    policies = timed["policy"][~timed["policy"].map(is_control)].drop_duplicates().sort_values().tolist()
    look = {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "linestyle": ""}
        for i, name in enumerate(policies)
    }
    settings = timed.groupby(["batch_rows", "phase", "mode", "device"], sort=True)
    figure, grid = figure_of(
        f"{model} on {benchmark}: quality against measured time",
        -(-len(settings) // 2),
        2,
        panel=1.45,
        between=(0.6, 0.62),
        margin=Margin(left=0.57, right=0.1, top=0.45, bottom=0.75),
        sharey=True,
    )
    for axes in grid.flat[len(settings) :]:
        axes.set_axis_off()
    for axes, ((rows, phase, mode, device), own) in zip(grid.flat, settings, strict=False):
        uniform = own[own["policy"] == "fixed"].sort_values("latency_ms_per_token")
        axes.plot(uniform["latency_ms_per_token"], uniform["quality"], **UNIFORM_LINE)
        for policy, style in look.items():
            one = own[own["policy"] == policy]
            low, high = one["latency_ms_per_token"] - one["p10"], one["p90"] - one["latency_ms_per_token"]
            axes.errorbar(one["latency_ms_per_token"], one["quality"], xerr=(low, high), elinewidth=0.6, **style)
        axes.set_title(f"{phase}, {rows} row{'s' if rows > 1 else ''}, {mode}, {device}")
        axes.set(xscale="log", xlabel="ms a token, p10 to p90", ylabel=f"{metric}, {evidence}")
        axes.tick_params(labelbottom=True, labelleft=True)
        log_ticks(axes.xaxis)
        axes.xaxis.set_major_formatter("{x:g}")
    key_below(figure, {"uniform depth": UNIFORM_LINE} | look)
    return figure
