"""The pictures of a diagnosis: orbits in their principal plane, steps by step, and what training made of them.

A diagnosis is what `diagnosis.diagnose` returns; its `training` holds one entry a checkpoint of the model's log.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench.reporting.drawing import write_figures
from halting_bench.reporting.panels import Margin, figure_of, key_below, step_axis
from halting_bench.reporting.style import COLOURS, MARKERS, ORACLE
from halting_bench.reporting.text import slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHECKPOINTS = 5
_START: dict[str, Any] = {"color": "#000000", "marker": "o", "markersize": 2.2, "linestyle": "", "zorder": 4}
_END: dict[str, Any] = {"color": "#000000", "marker": "+", "markersize": 5, "linestyle": "", "zorder": 4}
_KEY = {"start": _START, "end": _END}


def write_dynamics(found: dict[str, Any], model: str, folder: Path) -> list[Path]:
    """Writes every picture of a diagnosis into a folder; returns what was written."""
    drawings: dict[str, Callable[[], Figure | None]] = {
        f"orbits-{slug(model)}": partial(orbits, found, model),
        f"steps-{slug(model)}": partial(steps, found, model),
        f"orbits-in-training-{slug(model)}": partial(orbits_in_training, found, model),
        f"training-{slug(model)}": partial(training, found, model),
    }
    return write_figures(drawings, folder)


def orbits(found: dict[str, Any], model: str) -> "Figure":
    """A panel a loop: some tokens' states in the plane of most variance, each centred on where it ends."""
    loops = found["loops"]
    figure, grid = figure_of(
        f"{model} on {found['benchmark']}: states in their principal plane",
        -(-len(loops) // 3),
        min(len(loops), 3),
        panel=1.6 if len(loops) > 1 else 2.6,
        between=(0.45, 0.6),
        margin=Margin(left=0.45, right=0.1, top=0.45, bottom=0.6),
    )
    for axes in grid.flat[len(loops) :]:
        axes.set_axis_off()
    for axes, (name, loop) in zip(grid.flat, loops.items(), strict=False):
        _orbits(axes, loop["orbits"])
        share = loop["plane_share"]
        axes.set_title(f"{name}: not finite" if share is None else f"{name}: {share:.0%} of variance")
    key_below(figure, _KEY)
    return figure


def _orbits(axes: "Axes", rows: list[list[list[float]]]) -> None:
    for index, row in enumerate(rows):
        x, y = np.array(row, dtype=float).T  # None, which is not finite, becomes NaN
        axes.plot(x, y, color=COLOURS[index % len(COLOURS)], linewidth=0.7, marker=".", markersize=2)
        axes.plot(x[:1], y[:1], **_START)
    axes.plot(0, 0, **_END)
    axes.margins(0.12)


def steps(found: dict[str, Any], model: str) -> "Figure":
    """A column a loop: the medians of step and acceleration, and of the cosine of successive steps, against the step."""
    loops, handed = found["loops"], found["handed_on_after"]
    figure, grid = figure_of(
        f"{model} on {found['benchmark']}: how far and in which direction",
        2,
        len(loops),
        panel=1.2,
        between=(0.3, 0.35),
        margin=Margin(left=0.57, right=0.1, top=0.45, bottom=0.7),
        sharex=True,
        sharey="row",
    )
    step = {"color": COLOURS[0], "marker": MARKERS[0]}
    turn = {"color": COLOURS[1], "marker": MARKERS[1]}
    trained: dict[str, Any] = {"color": ORACLE, "linewidth": 0.8, "linestyle": ":"}
    for column, (name, loop) in zip(grid.T, loops.items(), strict=True):
        k = np.arange(1, len(loop["step_norm"]) + 1)
        column[0].plot(k, _numbers(loop["step_norm"]), **step)
        column[0].plot(k, _numbers(loop["acceleration"]), **turn)
        column[0].set(yscale="log", title=name)
        column[1].plot(k, _numbers(loop["cosine"]), color=COLOURS[2], marker=MARKERS[2])
        column[1].set(ylim=(-1.05, 1.05), xlabel="step")
        for axes in column:
            axes.axvline(handed, **trained)
            step_axis(axes)
    grid[0, 0].set_ylabel("median length")
    grid[1, 0].set_ylabel("median cosine")
    cosine = {"color": COLOURS[2], "marker": MARKERS[2]}
    key_below(figure, {"step": step, "acceleration": turn, "cosine of steps": cosine, "trained depth": trained})
    return figure


def _numbers(values: list[float | None]) -> np.ndarray:
    """NaN for None."""
    return np.array(values, dtype=float)


def orbits_in_training(found: dict[str, Any], model: str) -> "Figure | None":
    """Orbits at a few checkpoints, a row a loop, a column a checkpoint; None when the log kept none."""
    kept = [entry for entry in found["training"] if all("orbits" in loop for loop in entry["loops"].values())]
    if not kept:
        return None
    chosen = [kept[i] for i in sorted({round(i) for i in np.linspace(0, len(kept) - 1, CHECKPOINTS)})]
    names = list(chosen[0]["loops"])
    figure, grid = figure_of(
        f"{model}: states in their principal plane, as training went on",
        len(names),
        len(chosen),
        panel=0.95,
        between=(0.1, 0.15),
        margin=Margin(left=0.3, right=0.1, top=0.5, bottom=0.3),
    )
    for row, name in zip(grid, names, strict=True):
        row[0].set_ylabel(name)
        for axes, entry in zip(row, chosen, strict=True):
            _orbits(axes, entry["loops"][name]["orbits"])
            axes.tick_params(labelleft=False, labelbottom=False, length=0)
    for axes, entry in zip(grid[0], chosen, strict=True):
        axes.set_title(f"{entry['step']} updates")
    key_below(figure, _KEY)
    return figure


def training(found: dict[str, Any], model: str) -> "Figure | None":
    """Step, turning and contraction of each loop and the drift between loops, over training; None without a log."""
    entries = found["training"]
    if not entries:
        return None
    updates = [entry["step"] for entry in entries]
    names, hands = list(entries[0]["loops"]), list(entries[0]["drift_to_loop"])
    figure, grid = figure_of(
        f"{model}: at the trained depth, as training went on",
        2,
        2,
        panel=1.2,
        between=(0.6, 0.5),
        margin=Margin(left=0.57, right=0.1, top=0.45, bottom=0.75),
        sharex=True,
    )
    shown = {"relative_step": "relative step", "cosine": "cosine of steps", "contraction_rate": "contraction rate"}
    look = {name: {"color": COLOURS[i], "marker": MARKERS[i]} for i, name in enumerate(names)}
    for axes, (key, label) in zip(grid.flat, shown.items(), strict=False):
        for name in names:
            axes.plot(updates, _numbers([entry["loops"][name][key] for entry in entries]), **look[name])
        axes.set_title(label)
    for index, hand in enumerate(hands):
        style = {"color": COLOURS[index], "marker": MARKERS[index]}
        grid[1, 1].plot(updates, _numbers([entry["drift_to_loop"][hand] for entry in entries]), **style)
    grid[1, 1].set_title("drift-to-loop ratio out of a loop")
    for axes in grid[1]:
        axes.set_xlabel("updates")
    key_below(figure, look)
    return figure
