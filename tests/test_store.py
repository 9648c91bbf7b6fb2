"""The run directory: whole files or none, one writer, and a clear word for whatever is not a run."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from halting_bench.errors import UserError
from halting_bench.records import POINT_COLUMNS, SCHEMA_VERSION
from halting_bench.store import (
    Arrays,
    load_run,
    make_folder,
    open_run,
    read_manifest,
    write_arrays,
    write_bytes,
    write_frame,
    write_json,
)


def write_run(folder: Path, **manifest: object) -> Path:
    kinds = {"string": "", "bool": False, "int64": 0, "float64": 0.0}
    write_json(folder / "manifest.json", {"schema_version": SCHEMA_VERSION, "run_id": "x"} | manifest)
    write_frame(folder / "points.parquet", pd.DataFrame({name: [kinds[kind]] for name, kind in POINT_COLUMNS.items()}))
    return folder


def test_a_run_is_read_as_frames_and_absent_ones_are_empty(tmp_path: Path):
    run = load_run(write_run(tmp_path))
    assert run.manifest["run_id"] == "x"
    assert list(run.points.columns) == list(POINT_COLUMNS)
    assert run.latency.empty
    assert run.path == tmp_path


def test_the_same_frame_gives_the_same_bytes(tmp_path: Path):
    frame = pd.DataFrame({"a": [1.5, np.nan], "b": ["x", ""], "c": [True, False]})
    for name in ("one", "two"):
        write_frame(tmp_path / name, frame.copy())
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_arrays_come_back_as_they_were_one_at_a_time(tmp_path: Path):
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T  # not contiguous
    given = {"a/b": turned, "empty": np.empty((0, 4), np.uint8), "n": np.array([-3], np.int16)}
    write_arrays(tmp_path / "x.safetensors", given)
    found = Arrays(tmp_path / "x.safetensors")
    assert found.names == given.keys()
    for name, value in given.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == value.dtype


def test_a_write_leaves_no_temporary_file_and_replaces_the_old_one(tmp_path: Path):
    for data in (b"old", b"new"):
        write_bytes(tmp_path / "deep" / "file", data)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["file"]
    assert (tmp_path / "deep" / "file").read_bytes() == b"new"


def test_json_refuses_what_json_has_no_word_for(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert not (tmp_path / "x.json").exists()


@contextmanager
def small_disk() -> Iterator[None]:
    """Files may not grow beyond 10 kB: what a full disk answers, but for the number of the error.

    Only around the write itself: pytest's own output may be a file that is longer already.
    """
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_one_line_and_the_old_file_stays(tmp_path: Path):
    write_bytes(tmp_path / "file", b"old")
    expected = r"cannot write .*file \(.*\): free the disk or choose another --out$"
    with pytest.raises(UserError, match=expected), small_disk():
        write_bytes(tmp_path / "file", bytes(20_000))
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot write to .*file/run .*choose another --out"):
        open_run(tmp_path / "file" / "run").__enter__()


def test_a_folder_that_cannot_be_made_names_the_option_that_asked_for_it(tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot write to .*file \(.*\): choose another --plots$"):
        make_folder(tmp_path / "file", "--plots")


def test_a_run_has_one_writer_and_the_next_one_after_it(tmp_path: Path):
    held = rf"run is being written by process {os.getpid()} on .* since "
    with open_run(tmp_path / "run"), pytest.raises(UserError, match=held):
        open_run(tmp_path / "run").__enter__()
    with open_run(tmp_path / "run") as run:
        run.log("started", number=1)
    assert json.loads((tmp_path / "run" / "events.jsonl").read_text())["event"] == "started"


def test_the_lock_goes_with_its_process(tmp_path: Path):
    program = "import os, signal, sys; from pathlib import Path; from halting_bench.store import open_run\n"
    program += "held = open_run(Path(sys.argv[1])); held.__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".lock").read_text().startswith("process ")
    with open_run(tmp_path):
        pass


@pytest.mark.parametrize("opened", [False, True])
def test_a_newer_schema_is_refused(tmp_path: Path, opened: bool):
    write_run(tmp_path, schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(UserError, match=rf"schema {SCHEMA_VERSION + 1}, this version reads up to {SCHEMA_VERSION}: upgrade"):
        open_run(tmp_path).__enter__() if opened else load_run(tmp_path)


def test_a_folder_that_is_no_run_and_an_unfinished_run_say_so(tmp_path: Path):
    with pytest.raises(UserError, match=r"is not a run directory \(no manifest.json\): give the folder that a sweep wrote"):
        load_run(tmp_path)
    write_json(tmp_path / "manifest.json", {"schema_version": 1})
    with pytest.raises(UserError, match=r"is not finished .*run the same sweep command again"):
        load_run(tmp_path)
    assert read_manifest(tmp_path / "nowhere", missing_ok=True) == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"run_id": "x"}', '{"schema_version": "new"}', '"x"'])
def test_a_damaged_manifest_says_so(tmp_path: Path, text: str):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest.json is damaged"):
        read_manifest(tmp_path)


def test_damaged_and_foreign_tables_say_so(tmp_path: Path):
    write_run(tmp_path)
    (tmp_path / "exits.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"exits.parquet cannot be read"):
        load_run(tmp_path)
    (tmp_path / "exits.parquet").unlink()
    write_frame(tmp_path / "points.parquet", pd.DataFrame({"policy": ["kl"]}))
    with pytest.raises(UserError, match=r"points.parquet lacks the columns run_id, "):
        load_run(tmp_path)
