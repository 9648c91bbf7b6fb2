"""halting-bench recommend."""

from pathlib import Path
from typing import Annotated

import typer

from halting_bench.cli.output import print_json, say


def recommend(
    run: Annotated[Path, typer.Argument(help="A run directory that was swept with --keep-trace.")],
    max_loss: Annotated[float, typer.Option(help="Quality that may be lost against full depth, in the metric's unit.")],
    confidence: Annotated[float, typer.Option(help="Probability with which that holds for the policy picked.")] = 0.9,
    max_depth: Annotated[float | None, typer.Option(help="Budget: mean core steps a token.")] = None,
    max_flops: Annotated[float | None, typer.Option(help="Budget: FLOPs a token.")] = None,
    max_ms: Annotated[float | None, typer.Option(help="Budget: measured milliseconds a token.")] = None,
    bound: Annotated[float | None, typer.Option(help="Largest loss of a document that counts. Default: the metric's.")] = None,
    model: Annotated[str | None, typer.Option(help="Which model of the run.")] = None,
    benchmark: Annotated[str | None, typer.Option(help="Which benchmark of the run.")] = None,
    out: Annotated[Path, typer.Option(help="The deployment file to write.")] = Path("deployment.yaml"),
) -> None:
    """Pick the cheapest certified policy within a budget, and write it as a deployment file."""
    from halting_bench.catalog import show
    from halting_bench.deployment import write_deployment
    from halting_bench.recommend import Budget
    from halting_bench.recommend import recommend as pick
    from halting_bench.store import load_run

    budget = Budget(max_depth, max_flops, max_ms)
    chosen = pick(load_run(run), max_loss, confidence, budget=budget, bound=bound, model=model, benchmark=benchmark)
    write_deployment(out, chosen)
    print_json(show(chosen))
    say(f"written: {out}")
