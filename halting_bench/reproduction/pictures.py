"""The pictures of REPRODUCTION.md, drawn from the JSON documents that the parts wrote."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench.reporting.drawing import write_figures
from halting_bench.reporting.panels import Margin, figure_of, key_below, log_ticks, step_axis
from halting_bench.reporting.style import COLOURS, MARKERS, ORACLE, UNIFORM_LINE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TRAINED: dict[str, Any] = {"color": ORACLE, "linewidth": 0.8, "linestyle": ":"}


def draw(folder: Path) -> list[Path]:
    """Draws what the folder has a document for, beside it."""
    drawings: dict[str, Callable[[], Figure]] = {}
    for part, figure in PICTURES.items():
        document = folder / f"reproduction-{part}.json"
        if document.exists():
            drawings[document.stem] = partial(figure, json.loads(document.read_text()))
    return write_figures(drawings, folder)


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def two_scale(found: dict[str, Any]) -> "Figure":
    """A row a model: quality, and measured milliseconds, against tau (the mean of the loops' thresholds)."""
    rules = list(dict.fromkeys(point["policy"] for model in found.values() for point in model["points"]))
    look = {rule: _style(index) for index, rule in enumerate(rules)}
    figure, grid = figure_of(
        "Exit rules of models of three loops against their threshold",
        len(found),
        2,
        panel=1.35,
        between=(0.55, 0.5),
        margin=Margin(left=0.57, right=0.1, top=0.5, bottom=0.8),
        sharex="row",
    )
    for (quality, seconds), (name, model) in zip(grid, found.items(), strict=True):
        for rule in rules:
            points = [p for p in model["points"] if p["policy"] == rule and p["never_fired_fraction"] < 1]
            points.sort(key=lambda point: float(np.mean(point["thresholds"])))
            tau = [float(np.mean(point["thresholds"])) for point in points]
            quality.plot(tau, [point["quality"] for point in points], **look[rule])
            seconds.plot(tau, [point["ms_per_token"] for point in points], **look[rule])
        trained = model["uniform"][model["diagnosis"]["handed_on_after"] - 1]
        quality.axhline(trained["quality"], **_TRAINED)
        seconds.axhline(trained["ms_per_token"], **_TRAINED)
        benchmark = model["diagnosis"]["benchmark"]
        quality.set(xscale="log", title=name, ylabel="bits/byte ↓" if benchmark == "docs" else "accuracy ↑")
        seconds.set(title=f"{name}, CPU", ylabel="ms a token")
    for axes in grid[-1]:
        axes.set_xlabel("tau")
    key_below(figure, look | {"uniform, trained depth": _TRAINED}, columns=3)
    return figure


def self_transformer(found: dict[str, Any]) -> "Figure":
    """Accuracy by iterations and depth of a node, how the iteration settles, and how long it takes to."""
    figure, grid = figure_of(
        "self-tiny on the roots of pointer forests",
        1,
        3,
        panel=1.7,
        between=(0.55, 0.5),
        margin=Margin(left=0.5, right=0.1, top=0.5, bottom=0.95),
    )
    accuracy, residual, iterations = grid[0]
    levels = found["levels"]
    shade = {name: {"color": (0.85 * (1 - i / len(levels)),) * 3} for i, name in enumerate(levels)}
    for name, level in levels.items():
        by = level["accuracy_by_iterations"]
        accuracy.plot([int(k) for k in by], list(by.values()), **shade[name])
    accuracy.set(title="accuracy by depth", xlabel="iterations", xscale="log")
    accuracy.set_xticks((1, 2, 4, 8, 16, 32), ("1", "2", "4", "8", "16", "32"))
    accuracy.minorticks_off()
    residual.plot(np.arange(1, len(found["residual_median"]) + 1), found["residual_median"], color=COLOURS[0])
    residual.set(title="median relative step", xlabel="iteration", yscale="log")
    step_axis(residual)
    for index, key in enumerate(("iterations_to_0.1", "iterations_to_1e-3")):
        values = np.array([level[key] for level in levels.values()], dtype=float)
        iterations.plot(range(len(levels)), values, label=f"to {key.removeprefix('iterations_to_')}", **_style(index))
    iterations.set_xticks(range(len(levels)), list(levels))
    iterations.set(title="iterations by depth", xlabel="depth", ylim=(0, None))
    iterations.legend(frameon=False)
    key_below(figure, {f"depth {name}": look for name, look in shade.items()}, columns=3)
    return figure


def fixed_point(found: dict[str, Any]) -> "Figure":
    """A column a benchmark: how outputs settle, and the loss, against the number of loops."""
    figure, grid = figure_of(
        "Per-token fixed points: settling, and loss by uniform depth",
        2,
        len(found),
        panel=1.3,
        between=(0.5, 0.35),
        margin=Margin(left=0.57, right=0.1, top=0.5, bottom=0.75),
        sharex=True,
    )
    median, tail = {"color": COLOURS[0]}, {"color": COLOURS[1], "linestyle": "--"}
    trained = 8
    for column, (name, own) in zip(grid.T, found.items(), strict=True):
        k = np.arange(1, len(own["loss"]) + 1)
        for key, look in (("kl_median", median), ("kl_p90", tail)):
            kl = np.array(own[key], dtype=float)
            column[0].plot(k, np.where(kl > 0, kl, np.nan), **look)  # rounding leaves nothing of some
        column[0].set(yscale="log", title=name)
        column[1].fill_between(k, own["loss_lo"], own["loss_hi"], color="#00000022", linewidth=0)
        column[1].plot(k, own["loss"], **UNIFORM_LINE | {"marker": ""})
        column[1].set(yscale="log", xlabel="loops", ylim=(max(0.7 * min(own["loss"]), 0.98 * min(own["loss_lo"])), None))
        log_ticks(column[1].yaxis)
        for axes in column:
            axes.axvline(trained, **_TRAINED)
            step_axis(axes)
    grid[0, 0].set_ylabel("KL to the loop before, nats")
    grid[1, 0].set_ylabel("loss, nats")
    key_below(figure, {"median": median, "90th percentile": tail, "loss": UNIFORM_LINE | {"marker": ""}, "trained": _TRAINED})
    return figure


def gates(found: dict[str, Any]) -> "Figure":
    """A panel a model: accuracy against mean depth of its own head, of free rules, and of exits at random."""
    figure, grid = figure_of(
        "Halting heads trained with their model, replayed on shell",
        1,
        len(found),
        panel=1.9,
        between=(0.55, 0.5),
        margin=Margin(left=0.57, right=0.1, top=0.5, bottom=0.95),
        sharey=True,
    )
    names = list(dict.fromkeys(name for model in found.values() for name in model["curves"]))
    rules = [name for name in names if name != "fixed" and not name.startswith("random@")]
    look = {rule: _style(index) for index, rule in enumerate(rules)}
    for axes, (name, model) in zip(grid[0], found.items(), strict=True):
        for rule, points in model["curves"].items():
            own, at_random = look.get(rule.removeprefix("random@")), rule.startswith("random@")
            style = UNIFORM_LINE if own is None else own | ({"marker": "", "linestyle": "--"} if at_random else {})
            axes.plot([point["mean_depth"] for point in points], [point["quality"] for point in points], **style)
        axes.set(title=name, xlabel="mean depth (core steps a token)", xlim=(0, 16))
        step_axis(axes)
    grid[0, 0].set_ylabel("accuracy ↑")
    at_random_line = {"the head's exits at random": {"color": ORACLE, "linestyle": "--"}}
    key_below(figure, {"uniform depth": UNIFORM_LINE} | look | at_random_line, columns=3)
    return figure


PICTURES: dict[str, Callable[[dict[str, Any]], "Figure"]] = {
    "two-scale": two_scale,
    "self": self_transformer,
    "fixed-point": fixed_point,
    "gates": gates,
}
