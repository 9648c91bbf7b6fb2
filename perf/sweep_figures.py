"""The default sweep and the command line: how long, how much comes of it, and what is imported.

Run: python -m perf.sweep_figures
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from perf.figure import figure
from perf.page_figures import page_rows

COMMAND = "python -m perf.sweep_figures"
REPEATS = 5


def run(*arguments: str) -> tuple[float, float]:
    """Wall and CPU seconds of a `halting-bench` command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "halting_bench", *arguments], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports_torch(*arguments: str) -> bool:
    """Whether a command has torch in memory when it ends."""
    code = (
        "import sys; from halting_bench.cli.main import app\n"
        f"app({list(arguments)!r}, standalone_mode=False)\nsys.exit('torch' in sys.modules)"
    )
    return bool(subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode)


def measurements() -> list[dict]:
    from halting_bench.reporting.frames import is_control
    from halting_bench.store import load_run

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        wall, cpu = run("sweep", "--out", str(folder))
        points = load_run(folder).points
        reports = imports_torch("report", str(folder))
        page = page_rows(folder, COMMAND)
    ok = points[(points["status"] == "ok") & (points["subset"] == "all") & (points["split"] == "test")]
    distinct = int(ok["distinct"].sum())
    families = {policy for policy in ok["policy"] if not is_control(policy)}
    helps = [run("--help") for _ in range(REPEATS)]
    rows = [
        ("the default sweep", wall, "s", "< 180", "cpu"),
        ("CPU time of the default sweep", cpu, "s", None, "cpu"),
        ("distinct operating points of the default sweep", distinct, "points", ">= 1000", "cpu"),
        ("policy families of the default sweep", len(families), "families", ">= 14", "cpu"),
        ("benchmarks of the default sweep", ok["benchmark"].nunique(), "benchmarks", ">= 5", "cpu"),
        (f"--help (median of {REPEATS})", statistics.median(wall for wall, _ in helps), "s", "< 0.5", "cpu"),
        (f"CPU time of --help (median of {REPEATS})", statistics.median(cpu for _, cpu in helps), "s", None, "cpu"),
        ("report imports torch", float(reports), "(1: yes)", "== 0", "cpu"),
        ("list imports torch", float(imports_torch("list", "models")), "(1: yes)", "== 0", "cpu"),
    ]
    measured = [figure(name, float(value), unit, target, COMMAND, device=device) for name, value, unit, target, device in rows]
    return measured + page


if __name__ == "__main__":
    for row in measurements():
        print(row)
