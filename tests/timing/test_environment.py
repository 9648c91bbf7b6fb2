"""The stamp says where a number was made, and nothing about who made it."""

import getpass
import json
import subprocess
import sys
from pathlib import Path

from halting_bench.timing.environment import stamp


def test_the_stamp_names_versions_commit_and_device():
    environment = stamp("cpu", "float32")
    assert environment["versions"].keys() >= {"torch", "numpy", "lm-eval"}
    assert environment["device"]["type"] == "cpu" and environment["device"]["threads"] >= 1
    assert environment["dtype"] == "float32" and environment["cpu"]["cores"] >= 1
    assert environment["commit"] is None or (len(environment["commit"]) == 40 and environment["dirty"] in (True, False))


def test_the_stamp_is_json_without_a_path_or_a_user():
    text = json.dumps(stamp("cpu"))
    assert str(Path.home()) not in text and str(Path(__file__).parents[2]) not in text
    assert f"/{getpass.getuser()}" not in text


def test_without_a_device_torch_is_not_imported():
    code = "import sys; from halting_bench.timing.environment import stamp; stamp(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
