"""halting-bench tasks: which lm-eval tasks there are, whether they load, and reading them from local files."""

from pathlib import Path
from typing import Annotated

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
    """Tasks, groups and tags. Reading all of lm-eval's takes seconds."""
    from halting_bench.benchmarks.lm_eval_files import list_tasks

    rows = list_tasks(pattern, include_path)
    if as_json:
        print_json(rows)
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:{width}}  {row['kind']:5}  {row['file'].rpartition('/lm_eval/tasks/')[2]}".rstrip())


@tasks.command()
def validate(
    names: Annotated[list[str], typer.Argument(help="Tasks, groups, tags or YAML files.")],
    include_path: Include = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Load tasks and show the first question of each."""
    from halting_bench.benchmarks.lm_eval_files import validate_tasks

    rows = validate_tasks(names, include_path, offline=offline)
    if as_json:
        print_json(rows)
        return
    for number, row in enumerate(rows):
        shown = row | {key: repr(row[key]) for key in ("prompt", "answer")}
        print("\n" * (number > 0) + "\n".join(f"{key:12} {value}" for key, value in shown.items()))


@tasks.command()
def localize(
    task: Annotated[str, typer.Argument(help="A task of lm-eval's, or its YAML file.")],
    data: Annotated[Path, typer.Option(help="Folder with SPLIT.jsonl files of the task's data, or one file.")],
    out: Annotated[Path, typer.Option(help="Folder to write the task file to.")] = Path("tasks"),
    include_path: Include = None,
) -> None:
    """Write a task file that reads local data."""
    from halting_bench.benchmarks.lm_eval_files import localize as write_task

    print(write_task(task, data, out, include_path))
    say(f"use it with --include-path {out}")
