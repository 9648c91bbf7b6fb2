"""halting-bench tasks: which lm-eval tasks there are, whether they load, and reading them from local files."""

from pathlib import Path
from typing import Annotated, Any

import typer

from halting_bench.cli.output import print_json, say

tasks = typer.Typer(help="List, check or localize lm-eval tasks.", no_args_is_help=True)
Include = Annotated[Path | None, typer.Option(help="A folder with more task files.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Offline = Annotated[bool, typer.Option("--offline", help="Make no request to the hub (also: HALTING_BENCH_OFFLINE=1).")]


@tasks.command("list")
def list_(
    pattern: Annotated[str, typer.Argument(help="Shell pattern of names.")] = "*",
    include_path: Include = None,
    as_json: Json = False,
) -> None:
    """Tasks, groups and tags that a sweep or eval takes (reading all of lm-eval's takes seconds)."""
    from halting_bench.benchmarks.lm_eval_files import list_tasks

    _print(list_tasks(pattern, include_path), as_json)


@tasks.command()
def validate(
    names: Annotated[list[str], typer.Argument(help="Tasks, groups, tags or YAML files.")],
    include_path: Include = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Load tasks and show the first question of each."""
    from halting_bench.benchmarks.lm_eval_files import validate_tasks

    _print(validate_tasks(names, include_path, offline=offline), as_json)


@tasks.command()
def localize(
    task: Annotated[str, typer.Argument(help="A task of lm-eval's, or its YAML file.")],
    data: Annotated[Path, typer.Option(help="Folder with SPLIT.jsonl files of the task's data, or one file.")],
    out: Annotated[Path, typer.Option(help="Folder to write the task file to.")] = Path("tasks"),
    include_path: Include = None,
) -> None:
    """Write a task file that reads a task from local files, for machines without network."""
    from halting_bench.benchmarks.lm_eval_files import localize as write_task

    print(write_task(task, data, out, include_path))
    say(f"use it with --include-path {out}")


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
    elif len(rows[0]) <= 3:
        for row in rows:
            print("\t".join(row.values()))
    else:
        for row in rows:
            for key, value in row.items():
                print(f"{key:12} {value!r}" if key in ("prompt", "answer") else f"{key:12} {value}")
