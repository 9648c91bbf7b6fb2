"""From a model and a benchmark to a saved router, with its figures beside those of the free rules."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from halting_bench import catalog
from halting_bench.errors import UserError
from halting_bench.halting.routers import save_router
from halting_bench.sources import ModelSource
from halting_bench.store import make_folder
from halting_bench.training.router_comparison import compare
from halting_bench.training.routers import RouterRecipe, fit, harvest, quality_of

SHARES = (0.5, 0.75)
"""Where the documents are cut: before the first to train, up to the second to choose thresholds, the rest to test."""


def train_router(
    source: ModelSource,
    benchmark: str | None,
    recipes: list[RouterRecipe],
    out: Path | None,
    *,
    documents: int,
    max_steps: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Trains one router a recipe on the same harvest, writes each to `out`, and compares them with the free rules.

    Args:
        source: the model.
        benchmark: its name; None: the first that the model's card names.
        recipes: what to train.
        out: a folder, where a router's file is named after its kind and label; None: they are not kept.
        documents: how many, over all three parts.
        max_steps: of every trajectory; none: twice the trained number, or the trained number where there are no more.
        seed: of the initial states.

    Returns:
        `routers`: AUROC, calibration error and label rate on test documents; `rules`: every rule at equal quality.

    Raises:
        UserError: too few documents, or a model that has no single loop.
    """
    if max_steps is not None and max_steps < 1:
        raise UserError(f"--max-steps {max_steps} is no number of steps: give at least the trained one, or leave it out")
    if documents < 8:
        raise UserError(f"{documents} documents are too few to train, choose and test on: give at least 8")
    if out is not None:
        make_folder(out)
    if benchmark is None:
        named = catalog.find_model(str(source.folder))[1].benchmarks if source.folder else ()
        benchmark = named[0] if named else "docs"
    model, model_hash = source.load(), source.hash()
    chosen = source.benchmark(benchmark, model.spec)
    spec = model.spec
    steps = max_steps or (spec.mean_recurrence if spec.fixed_recurrence else 2 * spec.mean_recurrence)
    ids = chosen.sample(documents, seed)
    cuts = [round(share * len(ids)) for share in SHARES]
    parts = ids[: cuts[0]], ids[cuts[0] : cuts[1]], ids[cuts[1] :]
    train, choose, test = (harvest(model, chosen, part, max_steps=steps, seed=seed) for part in parts)
    routers, told = {}, {}
    for recipe in recipes:
        routers[recipe.name] = fit(train, recipe, model_hash)
        told[recipe.name] = quality_of(routers[recipe.name], test, recipe)
    rules = compare(choose, test, routers, spec.mean_recurrence)
    if out is not None:
        for recipe, (name, router) in zip(recipes, routers.items(), strict=True):
            report = {"benchmark": benchmark, "documents": len(ids), "recipe": asdict(recipe)} | told[name]
            save_router(router, out / f"{name}.safetensors", report)
    return {"benchmark": benchmark, "max_steps": steps, "documents": len(ids), "routers": told, "rules": rules}
