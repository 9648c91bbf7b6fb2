"""`halting-bench doctor`: its exit code says whether numbers from the model may be believed."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halting_bench.cli.main import app

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "my_model.py"


def doctor(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "80"})


@pytest.mark.parametrize("model", [str(ROOT / "tests" / "golden" / "ouro"), f"{EXAMPLE}@MyLoopedModel"])
def test_a_sound_model_exits_with_0(model):
    result = doctor(model, "--quick", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["believable"]) == (0, True)
    assert all(check["verdict"] != "fail" for check in document["checks"])


def test_an_unsound_model_exits_with_1_and_says_which_check_failed(tmp_path):
    unsound = tmp_path / "unsound.py"
    unsound.write_text(
        EXAMPLE.read_text().replace("self.places(context.positions)", "self.places(tokens * 0 + tokens.shape[-1])")
    )
    result = doctor(f"{unsound}@MyLoopedModel", "--quick")
    assert result.exit_code == 1
    failed = [line for line in result.stdout.splitlines() if " fail " in line]
    assert any(line.startswith("cached = uncached") for line in failed)
    assert "do not believe numbers from this model" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
