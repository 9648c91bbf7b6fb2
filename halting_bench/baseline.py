"""A committed baseline: the parts of a run that a gate reads, and nothing else."""

from pathlib import Path

from halting_bench.errors import UserError
from halting_bench.store import Run, load_run, write_bytes

PARTS = ("manifest.json", "per_document.parquet", "iso.parquet", "curves.parquet", "latency.parquet", "points.parquet")
"""points.parquet last: its presence says that the baseline is whole."""


def update_baseline(head: Run, folder: Path) -> list[Path]:
    """Replaces a baseline by a run. Returns the files written.

    Raises:
        UserError: the folder holds more than a baseline and its rules, or is the run itself.
    """
    if folder.resolve() == head.path.resolve():
        raise UserError(f"{folder} is the run itself: name another folder with --baseline")
    present = list(folder.iterdir()) if folder.exists() else []
    strangers = [path.name for path in present if path.name not in PARTS and path.suffix != ".yaml"]
    if strangers:
        raise UserError(f"{folder} holds more than a baseline ({min(strangers)}): give an empty or new folder with --baseline")
    written = []
    for name in PARTS:
        (folder / name).unlink(missing_ok=True)
    for name in PARTS:
        if (head.path / name).exists():
            write_bytes(folder / name, (head.path / name).read_bytes())
            written.append(folder / name)
    load_run(folder)
    return written
