"""halting-bench latency."""

from pathlib import Path
from typing import Annotated

import typer

from halting_bench.cli.output import print_tables, say
from halting_bench.errors import UserError


def latency(
    run: Annotated[Path, typer.Argument(help="A run directory that a sweep wrote.")],
    point: Annotated[list[str] | None, typer.Option(help="POLICY@THRESHOLD beside those on the fronts; repeat.")] = None,
    batch_rows: Annotated[list[int] | None, typer.Option(help="Texts at once; repeat. Default: 1, 8, 32, 64.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the run's.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a text or prompt. Default: the run's setting.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens that decoding adds to each prompt.")] = 32,
    time_budget: Annotated[float, typer.Option(help="Seconds for all of it; the same command goes on later.")] = 600.0,
    self_test: Annotated[bool, typer.Option("--self-test", help="Time one point against itself: the noise.")] = False,
    against: Annotated[str | None, typer.Option(help="Time against another run's model, or a model, in turns.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Time the points of a run: prefill and decoding, by batch size, beside uniform depths. The same command resumes."""
    from halting_bench.cli.progress import bars
    from halting_bench.latency import time_run
    from halting_bench.latency_compare import against as time_against
    from halting_bench.latency_compare import self_test as time_itself
    from halting_bench.latency_plan import LatencyRequest
    from halting_bench.reporting.exports import render_all
    from halting_bench.reporting.seconds import race_table
    from halting_bench.reporting.tables import summary_tables
    from halting_bench.reporting.write import write_all
    from halting_bench.store import load_run

    if self_test and against is not None:
        raise UserError("--self-test and --against are two questions: ask one at a time")
    request = LatencyRequest(
        tuple(point or ()), tuple(batch_rows or (1, 8, 32, 64)), device, length, new_tokens, time_budget_s=time_budget
    )
    if self_test:
        tables = [race_table(time_itself(load_run(run), request), None)]
    elif against is not None:
        tables = [race_table(time_against(load_run(run), against, request), against)]
    else:
        with bars() as progress:
            timed = time_run(run, request, progress=progress)
        write_all(timed, run)
        tables = [table for table in summary_tables(timed) if table.name.startswith("latency")]
        cut = int((timed.latency["status"] == "skipped").sum())
        if cut:
            say(f"{cut} points had no room in the time budget: the same command goes on with them")
    if as_json:
        print(render_all(tables, "json"), end="")
    else:
        print_tables(tables)
