"""halting-bench list, show and validate: what there is, and whether a file is right."""

from pathlib import Path
from typing import Annotated, Any

import typer

from halting_bench.cli.output import print_json
from halting_bench.errors import UserError, unknown_name
from halting_bench.sweep_config import SweepConfig

listing = typer.Typer(help="List models, policies, routers or benchmarks.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@listing.command("models")
def list_models(as_json: Json = False) -> None:
    """Bundled models."""
    from halting_bench import catalog

    cards = [catalog.find_model(name)[1] for name in catalog.model_names()]
    _print([(card.name, card.summary) for card in cards], as_json)


@listing.command("policies")
def list_policies(as_json: Json = False) -> None:
    """Built-in policy recipes, and those of installed packages."""
    from halting_bench import catalog

    names = [*catalog.policy_names(), *catalog.plugin_names()]
    _print([(name, catalog.find_policy(name).source) for name in names], as_json)


@listing.command("routers")
def list_routers(as_json: Json = False) -> None:
    """Learned routers and gates of the bundled models; their names are policies of `sweep`."""
    from halting_bench import catalog

    _print([(name, _router_summary(catalog.router_facts(name))) for name in catalog.router_names()], as_json)


def _router_summary(facts: dict[str, Any]) -> str:
    report = facts["report"]
    sees = " and change" if facts.get("inputs") == "latent+change" else ""
    told = f"AUROC {report['auroc']:.3f}, calibration error {report['calibration_error']:.3f} on {report['benchmark']}"
    return f"{facts['kind']}, label '{facts['label']}', sees the state{sees}: {told}"


@listing.command("benchmarks")
def list_benchmarks(as_json: Json = False) -> None:
    """Built-in benchmarks."""
    from halting_bench import catalog

    _print(list(catalog.BENCHMARKS.items()), as_json)


def _print(rows: list[tuple[str, str]], as_json: bool) -> None:
    import textwrap

    if as_json:
        print_json([{"name": name, "about": about} for name, about in rows])
        return
    width = min(max((len(name) for name, _ in rows), default=0) + 2, 28)
    for name, about in rows:
        if len(name) + 2 > width:  # a line of its own
            print(name)
        first = name.ljust(width) if len(name) + 2 <= width else " " * width
        print(textwrap.fill(about, 80, initial_indent=first, subsequent_indent=" " * width))


def show(name: Annotated[str, typer.Argument(help="A model, a policy, a router, a benchmark, or a file of one.")]) -> None:
    """Print a model's card, a policy's recipe, what is known of a router, or a benchmark's manifest."""
    import yaml

    from halting_bench import catalog

    value: Any
    if name in catalog.model_names() or Path(name).is_dir():
        value = catalog.show(catalog.find_model(name)[1])
    elif name in catalog.policy_names() or name in catalog.plugin_names() or "@" in name or name.endswith((".yaml", ".yml")):
        value = catalog.show(catalog.find_policy(name))
    elif name in catalog.router_names():
        value = catalog.router_facts(name)
    elif name in catalog.BENCHMARKS:
        value = catalog.find_benchmark(name).manifest()
    else:
        known = [*catalog.model_names(), *catalog.policy_names(), *catalog.router_names(), *catalog.BENCHMARKS]
        raise unknown_name("name", name, known)
    print(yaml.safe_dump(value, sort_keys=False, width=80, allow_unicode=True), end="")


def validate(
    file: Annotated[Path, typer.Argument(help="A policy recipe, sweep config, training recipe or card (YAML).")],
) -> None:
    """Check a YAML file and say what it is."""
    from halting_bench import catalog

    value = catalog.load_yaml(file)
    if "source" in value or "signal" in value:
        from halting_bench.plan import check_signals

        check_signals(catalog.parse(catalog.PolicyRecipe, value, str(file)))
        kind = "policy recipe"
    elif "family" in value:
        from halting_bench.training.recipe import load_recipe

        load_recipe(file)
        kind = "training recipe"
    elif "summary" in value:
        catalog.parse(catalog.Card, value, str(file))
        kind = "model card"
    elif set(value) <= set(SweepConfig.model_fields):
        catalog.parse(SweepConfig, value, str(file))
        kind = "sweep config"
    else:
        odd = sorted(set(value) - set(SweepConfig.model_fields))[0]
        raise UserError(f"{file}: {unknown_name('key', odd, SweepConfig.model_fields)}")
    print(f"{file}: a valid {kind}")
