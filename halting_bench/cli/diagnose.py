"""halting-bench diagnose."""

from pathlib import Path
from typing import Annotated, Any

import typer

from halting_bench.cli.output import print_json, say


def diagnose(
    model: Annotated[str, typer.Argument(help="A bundled model, a folder, a hub id or file.py@Class.")],
    benchmark: Annotated[str | None, typer.Option(help="What it reads; by default the first of its card, or docs.")] = None,
    documents: Annotated[int, typer.Option(min=2, help="Documents, one sequence of each.")] = 32,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of every loop; by default twice the trained number.")] = None,
    seed: Annotated[int, typer.Option(help="Of the initial states and of the choice of rows.")] = 0,
    plots: Annotated[Path | None, typer.Option(help="Draw orbits, steps and training into this folder, SVG and PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, with orbits in their principal plane.")] = False,
) -> None:
    """Describe how a model's states move: steps, turning, contraction, settling, and the drift between loops."""
    from halting_bench.diagnosis import diagnose_source
    from halting_bench.sources import find_model_source
    from halting_bench.store import make_folder

    source = find_model_source(model)
    if plots is not None:
        make_folder(plots, "--plots")
    found = diagnose_source(source, benchmark, documents=documents, steps=steps, seed=seed)
    if as_json:
        print_json(found)
    else:
        _print(found)
    if plots is not None:
        from halting_bench.reporting.dynamics_plot import write_dynamics

        written = write_dynamics(found, source.name, plots)
        say(f"{len(written)} pictures: {plots}")


def _print(found: dict[str, Any]) -> None:
    for name, loop in found["loops"].items():
        fates = ", ".join(f"{count} {fate}" for fate, count in loop["fates"].items())
        print(f"{name}: contraction {_cell(loop['contraction_rate'])}, {fates}")
        print(f"  {'step':>4} {'norm':>10} {'relative':>10} {'acceleration':>12} {'cosine':>8}")
        columns = (loop[key] for key in ("step_norm", "relative_step", "acceleration", "cosine"))
        for k, (norm, relative, acceleration, cosine) in enumerate(zip(*columns, strict=True), 1):
            print(f"  {k:>4} {_cell(norm):>10} {_cell(relative):>10} {_cell(acceleration):>12} {_cell(cosine):>8}")
    for name, hand in found["hand_offs"].items():
        print(f"{name}: drift-to-loop {hand['drift_to_loop']} [{hand['low']}, {hand['high']}] across {hand['across']}")
    for name, floor in found["noise_floor"].items():
        print(f"{name}: {_cell(floor)}")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
