"""halting-bench env."""

from typing import Annotated

import typer

from halting_bench.cli.output import print_json


def env(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Print what a run would record of this machine."""
    import torch

    from halting_bench.timing.environment import stamp

    found = stamp("cuda" if torch.cuda.is_available() else "cpu")
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        inner = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value
        print(f"{name:14} {'-' if inner is None else inner}")
