"""halting-bench gate."""

from pathlib import Path
from typing import Annotated

import typer

from halting_bench.cli.output import print_tables, say
from halting_bench.errors import UserError


def gate(
    head: Annotated[Path, typer.Argument(help="The run to judge.")],
    baseline: Annotated[Path, typer.Option(help="The run to judge it against.")],
    rules: Annotated[Path | None, typer.Option(help="YAML: what must not get worse, and by how much.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Also write JUnit XML.")] = None,
    format: Annotated[str | None, typer.Option("--format", help="md, csv, tex or json. Default: the terminal.")] = None,
    update_baseline: Annotated[bool, typer.Option("--update-baseline", help="Replace the baseline; judge nothing.")] = False,
) -> None:
    """Judge a run against a baseline. Exit codes: 0 ok, 1 regression, 3 inconclusive, 4 incomparable, 5 incomplete."""
    from halting_bench.analysis.gate import Verdict, exit_code
    from halting_bench.analysis.gate import gate as judge
    from halting_bench.analysis.rules import GateRules
    from halting_bench.baseline import update_baseline as replace_baseline
    from halting_bench.catalog import load_yaml, parse
    from halting_bench.reporting.exports import render
    from halting_bench.reporting.gate import gate_table
    from halting_bench.reporting.github import tell_github
    from halting_bench.reporting.junit import write_junit
    from halting_bench.rerun import sweep_command
    from halting_bench.store import load_run

    if update_baseline:
        say(f"baseline {baseline}: {len(replace_baseline(load_run(head), baseline))} files written")
        return
    if rules is None:
        raise UserError("a gate needs rules: type --rules FILE.yaml (results/reference/gate.yaml is an example)")
    run = load_run(head)
    judgements = judge(run, load_run(baseline), parse(GateRules, load_yaml(rules), str(rules)))
    table = gate_table(judgements)
    if format is None:
        print_tables([table])
    else:
        print(render(table, format), end="")
    if junit:
        write_junit(junit, judgements)
    if any(each.verdict is Verdict.INCOMPLETE for each in judgements):
        again = sweep_command(run.manifest, head.with_name(f"{head.name}-like"), "--like", str(baseline))
        say(f"what is missing, in a run of its own: {again}")
    for line in tell_github(judgements):
        say(line)
    raise typer.Exit(exit_code(judgements))
