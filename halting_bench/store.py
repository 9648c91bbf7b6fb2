"""The run directory: atomic writes, a lock, resume, and reading every schema up to ours. Imports no torch.

manifest.json      what was asked, resolved, and on what machine
cells/             one folder a (model, benchmark, seed): finished parts, each written whole or not at all
trace/             shards of the recorded pass, while they are needed
points.parquet     the records; points.csv joins the latency to them
tables/  plots/    rendered results
events.jsonl       what happened, a line each
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench.errors import UserError
from halting_bench.records import POINT_COLUMNS, SCHEMA_VERSION

if TYPE_CHECKING:
    import pandas as pd

FRAMES = ("points", "per_document", "curves", "convergence", "exits", "latency", "iso", "texts")
"""The parquet tables of a run. `latency` is absent where nothing was timed, `texts` where no benchmark is text."""


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all: temporary name, fsync, rename. A full disk is the user's to mend."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(f"cannot write {path} ({error.strerror}): free the disk or choose another --out") from None


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


def write_frame(path: Path, frame: "pd.DataFrame") -> None:
    """Parquet with deterministic bytes: the same frame gives the same file."""
    import io

    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False, engine="pyarrow", compression="zstd")
    write_bytes(path, buffer.getvalue())


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save

    write_bytes(path, save({name: np.ascontiguousarray(value) for name, value in arrays.items()}))


class Arrays:
    """A file of named arrays, read one at a time. The file is mapped only while it is read, so that memory stays flat."""

    def __init__(self, path: Path):
        from safetensors import safe_open

        self._path = path
        with safe_open(path, framework="numpy") as file:
            self.names = frozenset(file.keys())

    def __getitem__(self, name: str) -> np.ndarray:
        from safetensors import safe_open

        with safe_open(self._path, framework="numpy") as file:
            array: np.ndarray = file.get_tensor(name)
        return array


class RunDirectory:
    """A run being written. Use `open_run` to get one: it takes the lock."""

    def __init__(self, path: Path):
        self.path = path

    def part(self, *names: str) -> Path:
        return self.path.joinpath(*names)

    def log(self, event: str, **fields: Any) -> None:
        """Appends one line to events.jsonl."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields}, sort_keys=True)
        try:
            with open(self.part("events.jsonl"), "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self.part('events.jsonl')} ({error.strerror}): choose another --out") from None


def make_folder(path: Path, option: str = "--out") -> None:
    """Makes a folder that a command writes to, named by `option`. Raises UserError when it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {path} ({error.strerror}): choose another {option}") from None


@contextlib.contextmanager
def open_run(path: Path) -> Iterator[RunDirectory]:
    """Locks a run directory for writing, and removes what an interrupted write left behind.

    Raises:
        UserError: not writable, held by another process, or written by a newer version.
    """
    make_folder(path)
    try:
        lock = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115  (held for the whole run)
    except OSError as error:
        raise UserError(f"cannot write to {path} ({error.strerror}): choose another --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise UserError(f"{path} is being written by {holder}: wait for it, stop it, or choose another --out") from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        lock.flush()
        read_manifest(path, missing_ok=True)
        for leftover in list(path.rglob("*.partial")):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
        yield RunDirectory(path)


def read_manifest(path: Path, *, missing_ok: bool = False) -> dict:
    """The manifest of a run directory, checked for its schema."""
    file = path / "manifest.json"
    if not file.exists():
        if missing_ok:
            return {}
        raise UserError(f"{path} is not a run directory (no manifest.json): give the folder that a sweep wrote")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version = int(manifest["schema_version"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}): run the sweep again with another --out") from None
    if version > SCHEMA_VERSION:
        raise UserError(f"{path} has schema {version}, this version reads up to {SCHEMA_VERSION}: upgrade halting-bench")
    return dict(manifest)


def _no_frame() -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame()


@dataclass(frozen=True)
class Run:
    """A finished run, as pandas frames (see FRAMES); an absent one is empty."""

    path: Path
    manifest: dict
    points: "pd.DataFrame"
    per_document: "pd.DataFrame"
    curves: "pd.DataFrame"
    convergence: "pd.DataFrame"
    exits: "pd.DataFrame"
    latency: "pd.DataFrame"
    iso: "pd.DataFrame"
    texts: "pd.DataFrame" = field(default_factory=_no_frame)


def _read_frame(file: Path, *, categories: bool) -> "pd.DataFrame":
    """A table of a run. categories: keep each word once, for a table with millions of rows and few words."""
    import pandas as pd

    if not categories:
        return pd.read_parquet(file)
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pq.read_schema(file)
    words = [each.name for each in schema if pa.types.is_string(each.type) or pa.types.is_large_string(each.type)]
    # Each column becomes a block of its own and is let go at once: gathering them would copy everything once more.
    frame: pd.DataFrame = pq.read_table(file, read_dictionary=words).to_pandas(split_blocks=True, self_destruct=True)
    return frame


def load_run(path: str | Path) -> Run:
    """Reads a run directory.

    Raises:
        UserError: it is no run, of a newer schema, or not finished yet.
    """
    import pandas as pd

    folder = Path(path)
    manifest = read_manifest(folder)
    if not (folder / "points.parquet").exists():
        raise UserError(f"{folder} is not finished (no points.parquet): run the same sweep command again to resume it")
    frames = {}
    for name in FRAMES:
        file = folder / f"{name}.parquet"
        try:
            frames[name] = _read_frame(file, categories=name == "per_document") if file.exists() else pd.DataFrame()
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error}): run the same sweep command again") from None
    missing = [column for column in POINT_COLUMNS if column not in frames["points"]]
    if missing:
        raise UserError(
            f"{folder}/points.parquet lacks the columns {', '.join(missing)}: run the sweep again with another --out"
        )
    if frames["points"].empty:
        raise UserError(f"{folder}/points.parquet has no rows, so nothing was measured: run the sweep again with another --out")
    return Run(path=folder, manifest=manifest, **frames)
