"""halting-bench train."""

from pathlib import Path
from typing import Annotated

import typer

from halting_bench.cli.output import say


def train(
    recipe: Annotated[Path, typer.Argument(help="A training recipe, such as models/huginn-tiny/recipe.yaml.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and the finished model.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming.")] = False,
) -> None:
    """Train a depth-recurrent model from a recipe. The same command resumes."""
    from halting_bench.training.train import train as run

    say(f"model: {run(recipe, out, device=device, resume=not fresh)}")
