"""`halting-bench doctor MODEL`."""

import json
from typing import Annotated

import typer


def doctor(
    model: Annotated[
        str, typer.Argument(help="A bundled model, a folder, owner/name[@revision] on the hub, or file.py@Class.")
    ],
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Only what a sweep checks before it starts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the class that the checkpoint ships.")
    ] = False,
) -> None:
    """Check whether numbers measured on a model may be believed. Exit code 0: they may; 1: a check failed."""
    from rich.console import Console

    from halting_bench.doctor import believable, examine_source
    from halting_bench.reporting.checks import print_checks
    from halting_bench.sources import find_model_source

    source = find_model_source(model, trust_remote_code=trust_remote_code)
    checks = examine_source(source, dtype=dtype, device=device, quick=quick)
    if as_json:
        document = {**source.manifest(), "believable": believable(checks), "checks": [check.as_dict() for check in checks]}
        typer.echo(json.dumps(document, indent=2))
    else:
        print_checks(source.name, checks, Console())
    raise typer.Exit(0 if believable(checks) else 1)
