"""halting-bench sweep."""

from pathlib import Path
from typing import Annotated, Any

import typer

from halting_bench.cli.output import print_json, print_tables, say
from halting_bench.errors import UserError

FAILED_CELLS = 5  # exit code of an incomplete run


def sweep(
    config: Annotated[Path | None, typer.Option(help="YAML with any of the sweep's settings.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Bundled name or folder; repeat for several.")] = None,
    benchmark: Annotated[
        list[str] | None, typer.Option(help="Name, text:PATH or lm-eval:TASK; repeat. Default: the card's.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Name, FILE.yaml or FILE.py@Class; repeat. Default: all.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each question of lm-eval tasks.")] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder with more lm-eval task files.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="lm-eval makes no request to the hub.")] = False,
    limit: Annotated[str | None, typer.Option(help="Documents a benchmark: a number, 'all', or 'default'.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seeds of the initial states; repeat.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Deepest step. Default: four times the trained mean.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float64 or bfloat16.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory. Default: results/<run id>.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Any setting, key=value; dots go inside.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run a class the checkpoint ships.")] = False,
    keep_trace: Annotated[bool, typer.Option("--keep-trace", help="Keep the recorded pass for calibrate.")] = False,
    like: Annotated[Path | None, typer.Option(help="A run to compare with: ask the same, keep its points.")] = None,
    rules: Annotated[Path | None, typer.Option(help="A gate's rules: keep the points they name.")] = None,
    no_execute: Annotated[bool, typer.Option("--no-execute", help="Replay only: act out and time nothing.")] = False,
    no_latency: Annotated[bool, typer.Option("--no-latency", help="Act out the chosen points, but time nothing.")] = False,
    time_budget: Annotated[float | None, typer.Option(help="Seconds that timing may take in all.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and the number of model passes; do nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Sweep policies over benchmarks: quality against mean depth, tables and plots. The same command resumes."""
    from halting_bench.cli.progress import bars
    from halting_bench.jobs import plan_sweep
    from halting_bench.rerun import settings_of
    from halting_bench.store import read_manifest
    from halting_bench.sweep_config import read_config
    from halting_bench.sweeping.run import sweep as run_sweep

    given: dict[str, Any] = {
        "models": model,
        "benchmarks": benchmark,
        "policies": policy,
        "limit": parse_limit(limit),
        "seeds": seed,
        "max_steps": max_steps,
        "device": device,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code or None,
        "keep_trace": keep_trace or None,
        "like": str(like) if like else None,
        "rules": str(rules) if rules else None,
        "execute": False if no_execute else None,
    }
    inner = ["latency.enabled=false"] if no_latency else []
    inner += ["lm_eval.offline=true"] if offline else []
    inner += [f"lm_eval.num_fewshot={num_fewshot}"] if num_fewshot is not None else []
    inner += [f"lm_eval.include_path={include_path}"] if include_path is not None else []
    inner += [f"latency.time_budget_s={time_budget}"] if time_budget is not None else []
    asked = settings_of(read_manifest(like)) if like else None
    resolved = read_config(config, given, [*inner, *(settings or [])], like=asked)
    if dry_run:
        print_json(plan_sweep(resolved).summary())
        return
    with bars() as progress:
        folder = run_sweep(resolved, out=out, progress=progress)
    _show(folder, as_json, resolved.plots)


def parse_limit(text: str | None) -> int | str | None:
    """`--limit`: a number of documents, or a word."""
    if text is None or text in ("all", "default"):
        return text
    try:
        return int(text)
    except ValueError:
        raise UserError(f"--limit {text}: give a number of documents (2 or more), 'all' or 'default'") from None


def _show(folder: Path, as_json: bool, plots: bool) -> None:
    from halting_bench.reporting.exports import render_all
    from halting_bench.reporting.tables import summary_tables
    from halting_bench.reporting.write import write_all
    from halting_bench.store import load_run

    run = load_run(folder)
    tables = summary_tables(run)
    write_all(run, folder, plots=plots)
    if as_json:
        print(render_all(tables, "json"), end="")
    else:
        print_tables([table for table in tables if table.name.startswith(("summary", "acted"))])
        say(f"All tables and plots: {folder}/tables, {folder}/plots. Again, in any format: halting-bench report {folder}")
    failed = run.points[run.points["status"] == "failed"]
    if len(failed):
        first = failed.iloc[0]
        say(f"{len(failed)} cells failed, the first: {first['policy']} on {first['benchmark']}: {first['error']}")
        say("the same command tries them again; the tracebacks are in events.jsonl")
        raise typer.Exit(FAILED_CELLS)
