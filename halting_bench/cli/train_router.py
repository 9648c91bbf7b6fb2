"""halting-bench train-router."""

from pathlib import Path
from typing import Annotated

import typer

from halting_bench.cli.output import print_json, say


def train_router(
    model: Annotated[str, typer.Argument(help="A bundled model, a folder, a hub id or file.py@Class; of one loop.")],
    out: Annotated[Path, typer.Option(help="Folder for the routers (safetensors).")],
    kind: Annotated[list[str] | None, typer.Option(help="linear, mlp or gate; may be repeated. Default: all.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="converged, saturated, improvement, gain. Default: gain for a gate, else the rest."),
    ] = None,
    inputs: Annotated[str, typer.Option(help="latent, or latent+change: how far and how evenly it moves, too.")] = "latent",
    benchmark: Annotated[str | None, typer.Option(help="By default the first that the model's card names.")] = None,
    documents: Annotated[int, typer.Option(help="Over training, choosing and testing.")] = 256,
    max_steps: Annotated[int | None, typer.Option(help="Of every trajectory; by default twice the trained number.")] = None,
    per_step: Annotated[bool, typer.Option("--per-step", help="One head a step instead of one for all.")] = False,
    seed: Annotated[int, typer.Option(help="Of training and of the initial states.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
) -> None:
    """Train routers on labels harvested from a frozen model, and compare them with the free rules at equal quality."""
    from halting_bench.halting.routers import KINDS, LABELS
    from halting_bench.sources import find_model_source
    from halting_bench.training.router_run import train_router as run
    from halting_bench.training.routers import USUAL_LABELS, RouterRecipe

    asked = [(k, want) for k in kind or KINDS for want in label or USUAL_LABELS.get(k, LABELS)]
    recipes = [RouterRecipe(k, want, shared=not per_step, inputs=inputs, seed=seed) for k, want in asked]
    found = run(find_model_source(model), benchmark, recipes, out, documents=documents, max_steps=max_steps, seed=seed)
    say(f"routers: {out}")
    if as_json:
        print_json(found)
        return
    print(f"{'router':<26} {'AUROC':>6} {'ECE':>6} {'label rate':>10}")
    for name, told in found["routers"].items():
        print(f"{name:<26} {told['auroc']:>6.3f} {told['calibration_error']:>6.3f} {told['label_rate']:>10.3f}")
    print(f"\n{'at equal quality':<26} {'depth':>5} {'95 %':>14} {'quality':>7} {'minus full depth, 95 %':>24}")
    for row in found["rules"]:
        depth = f"[{row['depth_lo']:.2f}, {row['depth_hi']:.2f}]"
        delta = f"{row['delta']:+.3f} [{row['delta_lo']:+.3f}, {row['delta_hi']:+.3f}]"
        print(f"{row['rule']:<26} {row['mean_depth']:>5.2f} {depth:>14} {row['quality']:>7.3f} {delta:>24}")
    print("\nDepth: core steps a scored token. ECE: expected calibration error. Thresholds")
    print("chosen on some documents, figures on others. To see one beside the free rules:")
    print("halting-bench sweep --policy FILE.safetensors --policy kl")
