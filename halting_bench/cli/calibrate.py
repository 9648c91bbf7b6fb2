"""halting-bench calibrate."""

from pathlib import Path
from typing import Annotated

import typer

from halting_bench.cli.output import print_tables


def calibrate(
    run: Annotated[Path, typer.Argument(help="A run directory that was swept with --keep-trace.")],
    max_loss: Annotated[float, typer.Option(help="Quality that may be lost against full depth, in the metric's unit.")],
    confidence: Annotated[float, typer.Option(help="Probability with which that holds.")] = 0.9,
    bound: Annotated[float | None, typer.Option(help="Largest loss of a document that counts. Default: the metric's.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Only this policy; repeat for several.")] = None,
    best_of_all: Annotated[bool, typer.Option("--best-of-all", help="Hold for whichever row is picked as the best.")] = False,
    format: Annotated[str | None, typer.Option("--format", help="md, csv, tex or json. Default: the terminal.")] = None,
) -> None:
    """Find for each policy the fastest threshold that keeps a promised quality."""
    from halting_bench.calibrate import calibrate as run_calibration
    from halting_bench.reporting.calibration import calibration_tables
    from halting_bench.reporting.exports import render_all
    from halting_bench.store import load_run

    frame = run_calibration(load_run(run), max_loss, confidence, bound=bound, policies=policy, best_of_all=best_of_all)
    tables = calibration_tables(frame)
    if format is None:
        print_tables(tables)
    else:
        print(render_all(tables, format), end="")
