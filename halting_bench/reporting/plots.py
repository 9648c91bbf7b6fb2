"""The pictures of a run.

Each function takes the run and one (model, benchmark) pair and returns a figure. Test documents only.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halting_bench.reporting.drawing import write_figures
from halting_bench.reporting.frames import POINT, chosen_points, drawn_pairs, is_control, of_pair, over_seeds, ranked, select
from halting_bench.reporting.latency_plot import quality_against_latency
from halting_bench.reporting.panels import (
    Margin,
    beside,
    draw_policy,
    figure_of,
    groups_of,
    key_below,
    legend_below,
    log_ticks,
    members,
    panels_by_group,
    step_axis,
)
from halting_bench.reporting.style import ORACLE, UNIFORM, UNIFORM_LINE, Look, looks
from halting_bench.reporting.text import metric_label, slug
from halting_bench.store import Run

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEAT_MAPS = 6  # policies whose exits are shown: the oracle and the best
_STAR: dict[str, Any] = {"marker": "*", "markersize": 7.5, "markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 5}
_RANDOM: dict[str, Any] = {"linestyle": (0, (3, 2)), "linewidth": 0.6, "alpha": 0.8}
_FULL: dict[str, Any] = {"color": ORACLE, "linewidth": 0.8, "linestyle": ":", "zorder": 1}
_ORACLE: dict[str, Any] = {"color": ORACLE, "linewidth": 1.0, "linestyle": "-."}


def write_plots(run: Run, folder: Path) -> list[Path]:
    """Draws every plot of a run as `<name>-<model>-<benchmark>.svg` and `.png`; returns what was written."""
    drawings = {
        f"{name}-{slug(model)}-{slug(benchmark)}": partial(draw, run, model, benchmark)
        for model, benchmark in drawn_pairs(run)
        for name, draw in PLOTS.items()
    }
    return write_figures(drawings, folder)


def quality_against_depth(run: Run, model: str, benchmark: str) -> "Figure":
    """Every rule's whole curve over mean depth; see `_fronts`."""
    figure, panels = _fronts(run, model, benchmark, "mean_depth", _test_curves(run, model, benchmark), "mean depth")
    for axes in panels:
        axes.axvline(of_pair(run.iso, model, benchmark)["full_depth"].max(), **_FULL)
        axes.set_xlabel("mean depth (core steps a token)")
        step_axis(axes)
    return figure


def quality_against_flops(run: Run, model: str, benchmark: str) -> "Figure":
    """Every rule's points over counted cost; see `_fronts`."""
    from matplotlib.ticker import EngFormatter

    points = select(of_pair(run.points, model, benchmark), "test")
    rules = points[~points["policy"].map(is_control)]
    figure, panels = _fronts(run, model, benchmark, "flops_per_token", rules, "counted cost")
    for axes in panels:
        axes.set_xscale("log")
    for axes in panels:
        axes.set_xlabel("FLOPs a token")
        log_ticks(axes.xaxis)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def _fronts(
    run: Run, model: str, benchmark: str, cost: str, curves: "pd.DataFrame", called: str
) -> tuple["Figure", list["Axes"]]:
    """Quality over a cost: rules and their random controls, uniform depth and the oracle; a star at the point of equal quality.

    A rule that always or never fires has no star: it is a uniform depth.
    """
    points = select(of_pair(run.points, model, benchmark), "test")
    look = _looks(run, curves["policy"])
    chosen = chosen_points(run, model, benchmark)
    stars = chosen[(chosen["status"] == "ok") & (chosen["exit_spread"] != 0)]
    uniform, oracle = (
        over_seeds(points[points["policy"] == name], ["policy", "threshold"]).sort_values(cost)
        for name in ("fixed", "oracle-loss")
    )
    figure, panels = panels_by_group(f"{model} on {benchmark}: quality against {called}", look)
    for group, axes in panels.items():
        for policy, style in members(look, group):
            for _, random in points[points["policy"] == f"random@{policy}"].sort_values(cost).groupby("seed"):
                axes.plot(random[cost], random["quality"], color=style.colour, **_RANDOM)
            draw_policy(axes, curves[curves["policy"] == policy], cost, "quality", policy, style)
            star = stars[stars["policy"] == policy]
            axes.plot(star[cost], star["quality"], linestyle="", color=style.colour, **_STAR)
        axes.axhline(chosen["full_quality"].max(), **_FULL)
        axes.plot(uniform[cost], uniform["quality"], **UNIFORM_LINE)
        axes.plot(oracle[cost], oracle["quality"], **_ORACLE)
        axes.set_ylabel(_metric(run, model, benchmark))
        legend_below(axes)
    key_below(
        figure,
        {
            "uniform depth": UNIFORM_LINE,
            "loss oracle": _ORACLE,
            "full depth": _FULL,
            "random exits": {"color": UNIFORM, **_RANDOM},
            "least depth of equal quality": {"color": UNIFORM, "linestyle": "", **_STAR},
        },
    )
    return figure, list(panels.values())


def against_threshold(run: Run, model: str, benchmark: str) -> "Figure":
    """Quality and mean depth of every rule against its threshold."""
    curves = _test_curves(run, model, benchmark)
    curves = curves[(curves["threshold"] > 0) & curves["threshold"].lt(float("inf"))]
    look = _looks(run, curves["policy"])
    groups = groups_of(look)
    figure, grid = figure_of(
        f"{model} on {benchmark}: against the threshold",
        len(groups),
        2,
        panel=1.0,
        between=(0.55, 0.45),
        margin=Margin(left=0.57, right=1.3, top=0.45, bottom=0.4),
        sharex="row",
        sharey="col",
    )
    for row, group in zip(grid, groups, strict=True):
        for axes, value, label in zip(
            row, ("quality", "mean_depth"), (_metric(run, model, benchmark), "mean depth"), strict=True
        ):
            for policy, style in members(look, group):
                draw_policy(axes, curves[curves["policy"] == policy], "threshold", value, policy, style)
            axes.set(xscale="log", ylabel=label)
            log_ticks(axes.xaxis)
        row[0].set_title(group)
        row[1].legend(*row[1].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    for axes in grid[-1]:
        axes.set_xlabel("threshold")
    return figure


def exit_histograms(run: Run, model: str, benchmark: str) -> "Figure | None":
    """Where tokens stop, by level and token class: the share of each row's tokens that exit at each step.

    None where the run kept no exits.
    """
    from matplotlib.colors import PowerNorm

    exits = of_pair(run.exits, model, benchmark)
    if exits.empty:
        return None
    iso = of_pair(run.iso, model, benchmark)
    names = ["oracle-loss", *ranked(run, model, benchmark)]
    exits = exits.merge(iso.loc[(iso["status"] == "ok") & iso["policy"].isin(names), POINT], on=POINT)
    chosen = [name for name in names if name in set(exits["policy"])][:_HEAT_MAPS]
    subsets = list(exits["subset"].drop_duplicates())
    last = int(of_pair(run.points, model, benchmark)["max_steps"].max())
    rows = -(-max(len(chosen), 1) // 3)
    shown = f"the oracle and {len(chosen) - 1} of {len(names) - 1} policies" if len(chosen) < len(names) else "every policy"
    labels = [subset.replace(":", " ") for subset in subsets]
    figure, grid = figure_of(
        f"{model} on {benchmark}: exits ({shown})",
        rows,
        3,
        panel=0.14 * max(len(subsets), 1),
        between=(0.12, 0.35),
        margin=Margin(left=0.2 + 0.047 * max(map(len, labels), default=0), right=0.75, top=0.45, bottom=0.6),
        sharex=True,
        sharey=True,
    )
    families = [subset.partition(":")[0] for subset in subsets]
    borders = [i - 0.5 for i in range(1, len(families)) if families[i] != families[i - 1]]
    image = None
    for axes, policy in zip(grid.flat, chosen, strict=False):
        counts = exits[exits["policy"] == policy].pivot_table(index="subset", columns="step", values="count", aggfunc="sum")
        counts = counts.reindex(index=subsets, columns=range(1, last + 1)).fillna(0)
        share = counts.div(counts.sum(axis=1), axis=0)
        image = axes.imshow(
            share, cmap="Blues", norm=PowerNorm(0.5, 0, 1), aspect="auto", extent=(0.5, last + 0.5, len(subsets) - 0.5, -0.5)
        )
        axes.plot(share @ share.columns, range(len(subsets)), "|", color="#D55E00", markersize=7, markeredgewidth=1.3)
        axes.set_title(policy)
        axes.hlines(borders, 0.5, last + 0.5, color="white", linewidth=1.5)
        axes.set_yticks(range(len(subsets)), labels)
        axes.grid(visible=False)
    for axes in grid.flat[len(chosen) :]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel("exit step")
        step_axis(axes)
    if image is not None:
        figure.colorbar(image, cax=beside(figure, grid), label="share of the row's tokens", ticks=[0, 0.05, 0.2, 0.5, 1])
        key_below(
            figure,
            {"mean exit step": {"color": "#D55E00", "linestyle": "", "marker": "|", "markersize": 7, "markeredgewidth": 1.3}},
        )
    return figure


def convergence(run: Run, model: str, benchmark: str) -> "Figure | None":
    """Median and 90th percentile of every signal at each step; None where nothing was traced."""
    frame = of_pair(run.convergence, model, benchmark)
    if frame.empty:
        return None
    look = _looks(run, frame["signal"])
    figure, panels = panels_by_group(f"{model} on {benchmark}: convergence of the signals", look, sharey=False)
    for group, axes in panels.items():
        for signal, style in members(look, group):
            own = frame[frame["signal"] == signal]
            draw_policy(axes, own[own["median"] > 0], "step", "median", signal, style)
            for _, one in own[own["p90"] > 0].groupby("seed"):
                axes.plot(one["step"], one["p90"], color=style.colour, **_RANDOM)
        axes.set(yscale="log", xlabel="recurrence step k", ylabel="score")
        log_ticks(axes.yaxis)
        step_axis(axes)
        legend_below(axes)
    key_below(figure, {"median": {"color": UNIFORM}, "90th percentile": {"color": UNIFORM, **_RANDOM}})
    return figure


PLOTS: dict[str, Callable[[Run, str, str], "Figure | None"]] = {
    "quality-against-depth": quality_against_depth,
    "quality-against-flops": quality_against_flops,
    "quality-against-latency": quality_against_latency,
    "against-threshold": against_threshold,
    "exit-histograms": exit_histograms,
    "convergence": convergence,
}


def _test_curves(run: Run, model: str, benchmark: str) -> "pd.DataFrame":
    """Every rule's exact curve; of a rule that has none, since it has no score to sort or was not replayed, its points."""
    import pandas as pd

    points = select(of_pair(run.points, model, benchmark), "test")
    rules = points[~points["policy"].map(is_control)]
    curves = of_pair(run.curves, model, benchmark)
    if curves.empty:
        return rules.reset_index(drop=True)
    curves = curves[curves["split"] == "test"]
    return pd.concat([curves, rules[~rules["policy"].isin(curves["policy"])]], ignore_index=True)


def _looks(run: Run, names: "pd.Series") -> dict[str, Look]:
    """The looks of some policies or signals: of all that the run has, so that each keeps its own from plot to plot."""
    policies = [policy for policy in run.points["policy"].drop_duplicates() if not is_control(policy)]
    shown, signals = set(names), [] if run.convergence.empty else run.convergence["signal"]
    return {name: look for name, look in looks([*policies, *signals]).items() if name in shown}


def _metric(run: Run, model: str, benchmark: str) -> str:
    return metric_label(*of_pair(run.points, model, benchmark)[["metric", "higher_is_better"]].iloc[0])
