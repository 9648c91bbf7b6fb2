"""The command line: what there is, and how a user's mistake is told. Each command lives in a file of its own."""

import sys

import typer

from halting_bench.cli import (
    calibrate,
    compare,
    diagnose,
    doctor,
    env,
    eval,
    gate,
    inspect,
    latency,
    recommend,
    report,
    sweep,
    tasks,
    train,
    train_router,
)
from halting_bench.errors import UserError

app = typer.Typer(
    name="halting-bench",
    help="Benchmarks halting policies of depth-recurrent transformers: quality against mean depth and real latency.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(sweep.sweep)
app.command()(report.report)
app.command()(latency.latency)
app.command()(calibrate.calibrate)
app.command()(recommend.recommend)
app.command()(compare.compare)
app.command()(gate.gate)
app.command()(doctor.doctor)
app.command()(diagnose.diagnose)
app.command(name="eval")(eval.evaluate)
app.add_typer(tasks.tasks, name="tasks")
app.command()(train.train)
app.command(name="train-router")(train_router.train_router)
app.add_typer(inspect.listing, name="list")
app.command()(inspect.show)
app.command()(inspect.validate)
app.command()(env.env)


def main() -> None:
    """Runs the command line. A user's mistake is one line on stderr and exit code 2, never a traceback."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: what is finished is kept; the same command goes on from there", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `halting-bench report ... | head`
        sys.stderr.close()
        sys.exit(0)
