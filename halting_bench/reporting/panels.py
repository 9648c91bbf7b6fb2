"""What the plots are built from: figures of panels of known size, one panel a group of policies, lines and legends."""

from typing import TYPE_CHECKING, Any, NamedTuple

from halting_bench.reporting.style import WIDTH, Look

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_LINE = 0.125  # inches a line of a legend
_MARKER_GAP = 0.18  # of the diagonal of a panel


class Margin(NamedTuple):
    """Room around the panels, in inches."""

    left: float
    right: float
    top: float
    bottom: float


def figure_of(
    title: str, rows: int, columns: int, *, panel: float, between: tuple[float, float], margin: Margin, **share: Any
) -> tuple["Figure", Any]:
    """A figure of panels of known size, with its title. Lengths in inches.

    The layout is computed rather than searched for: it is faster than a layout engine, and steady from run to run.

    Args:
        title: over all panels.
        rows: of panels.
        columns: of panels.
        panel: height of a panel.
        between: horizontal and vertical room between panels.
        margin: room around all panels.
        share: `sharex`, `sharey` of the panels.
    """
    from matplotlib.figure import Figure

    height = margin.top + rows * panel + (rows - 1) * between[1] + margin.bottom
    width = (WIDTH - margin.left - margin.right - (columns - 1) * between[0]) / columns
    figure = Figure(figsize=(WIDTH, height))
    figure.text(0.05 / WIDTH, 1 - 0.05 / height, title, ha="left", va="top", fontsize=8, fontweight="bold")
    place = {
        "left": margin.left / WIDTH,
        "right": 1 - margin.right / WIDTH,
        "bottom": margin.bottom / height,
        "top": 1 - margin.top / height,
        "wspace": between[0] / width,
        "hspace": between[1] / panel,
    }
    return figure, figure.subplots(rows, columns, squeeze=False, gridspec_kw=place, **share)


def groups_of(look: dict[str, Look]) -> list[str]:
    """The groups that have a panel; without any rule there is one for what is drawn in every panel."""
    return list(dict.fromkeys(style.group for style in look.values())) or ["no rules"]


def members(look: dict[str, Look], group: str) -> list[tuple[str, Look]]:
    return [(name, style) for name, style in look.items() if style.group == group]


def panels_by_group(title: str, look: dict[str, Look], *, sharey: bool = True) -> tuple["Figure", dict[str, "Axes"]]:
    """A figure with a panel for each group of policies, two a row."""
    groups = groups_of(look)
    lines = [-(-len(members(look, group)) // 2) for group in groups]
    figure, grid = figure_of(
        title,
        -(-len(groups) // 2),
        2,
        panel=1.45,
        between=(0.6, 0.6 + _LINE * max(lines)),
        margin=Margin(left=0.57, right=0.1, top=0.45, bottom=0.6 + _LINE * max(lines[(len(groups) - 1) // 2 * 2 :])),
        sharex=True,
        sharey=sharey,
    )
    for axes in grid.flat[len(groups) :]:
        axes.set_axis_off()
    panels = dict(zip(groups, grid.flat, strict=False))
    for group, axes in panels.items():
        axes.set_title(group)
        axes.tick_params(labelbottom=True, labelleft=True)
    return figure, panels


def draw_policy(axes: "Axes", frame: "pd.DataFrame", x: str, y: str, label: str, style: Look) -> None:
    """One line a seed, the label at the first; markers evenly spaced on the paper, and not where another policy has its own."""
    for _, one in frame.groupby("seed"):
        one = one.sort_values(x, kind="stable")
        axes.plot(
            one[x],
            one[y],
            label=label,
            color=style.colour,
            marker=style.marker,
            markevery=(style.phase * _MARKER_GAP, _MARKER_GAP),
            markeredgecolor="white",
            markeredgewidth=0.3,
        )
        label = "_"


def step_axis(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 4, 5, 10]))


def log_ticks(axis: "Axis") -> None:
    """Ticks of a logarithmic axis: powers of ten, and 2 and 5 times them where it spans too few."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_minor_locator(NullLocator())
    if high < 50 * low:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")


def beside(figure: "Figure", grid: Any) -> "Axes":
    """A narrow axes to the right of all panels, for a colour bar."""
    top, bottom = grid[0, -1].get_position(), grid[-1, -1].get_position()
    return figure.add_axes((top.x1 + 0.1 / WIDTH, bottom.y0, 0.1 / WIDTH, top.y1 - bottom.y0))


def legend_below(axes: "Axes") -> None:
    """The policies of a panel, below it."""
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(-0.17, -0.25),
        ncols=2,
        borderaxespad=0,
        frameon=False,
        handlelength=1.8,
        columnspacing=1.0,
    )


def key_below(figure: "Figure", entries: dict[str, dict[str, Any]], columns: int | None = None) -> None:
    """What the lines that are the same in every panel mean, below the panels, in one row unless columns are given."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **look) for label, look in entries.items()]
    figure.legend(handles=handles, loc="lower center", ncols=columns or len(handles), frameon=False, handlelength=2.2)
