"""A sweep that is killed loses nothing: resumed, it ends with the bytes of one that was left alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from toy_sweeps import assert_same_points, settings

from halting_bench.store import Run, load_run, open_run
from halting_bench.sweeping.run import sweep


def test_ten_kills_at_random_moments_then_the_same_bytes(tmp_path: Path):
    settings(tmp_path)  # writes the toy, so that no child does
    program = Path(__file__).parent / "killing.py"
    done = subprocess.run([sys.executable, str(program), str(tmp_path), "10"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["kills"] == 10
    assert len(told["digests"]) >= 2
    assert set(told["digests"]) == {told["digests"][0]}


def interrupt(folder: Path, out: Path, after: int) -> None:
    """Raises in the middle of a sweep, after so many parts of the work."""
    parts = iter(range(after))

    class Stops:
        def start(self, what: str, total: int):
            def advance() -> None:
                if next(parts, None) is None:
                    raise KeyboardInterrupt

            return advance

    with pytest.raises(KeyboardInterrupt):
        sweep(settings(folder), out=out, progress=Stops())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("whole")
    return load_run(sweep(settings(folder), out=folder / "run"))


@pytest.mark.parametrize("after", [0, 3, 9])
def test_an_interrupted_sweep_keeps_its_parts_and_resumes(whole: Run, after: int):
    folder = whole.path.parent
    out = folder / f"interrupted-{after}"
    interrupt(folder, out, after)
    assert not (out / "points.parquet").exists()
    done = {path: path.stat().st_mtime_ns for path in [*out.glob("trace/**/*.safetensors"), *out.glob("cells/**/*.parquet")]}
    sweep(settings(folder, keep_trace=True), out=out)
    assert all(path.stat().st_mtime_ns == when for path, when in done.items())
    assert_same_points(load_run(out).points, whole.points)


def test_what_a_killed_write_left_behind_is_removed(tmp_path: Path):
    (tmp_path / "cells" / "curve-x.partial").mkdir(parents=True)
    (tmp_path / "cells" / "curve-x.partial" / "0-v.npy").write_bytes(b"half")
    (tmp_path / "points.parquet.7.partial").write_bytes(b"half")
    with open_run(tmp_path):
        assert not list(tmp_path.rglob("*.partial"))
