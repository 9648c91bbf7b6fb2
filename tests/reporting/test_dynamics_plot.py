"""A small model is trained, diagnosed with what its log kept, and drawn."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from halting_bench.diagnosis import diagnose_source, logged
from halting_bench.errors import UserError
from halting_bench.reporting.dynamics_plot import CHECKPOINTS, orbits, orbits_in_training, steps, training, write_dynamics
from halting_bench.sources import find_model_source
from halting_bench.training.train import train

RECIPE = {
    "name": "tiny", "summary": "A test.", "family": "two_scale", "steps": 8, "batch_tokens": 64, "log_every": 1,
    "depth": {"mean": 2, "cap": 3, "backprop": 2}, "mixture": [{"task": "shell"}],
    "config": {
        "vocab_size": 256, "n_embd": 16, "n_head": 2, "n_inner": 16, "n_positions": 128, "plain_layers": [1, 1, 1],
        "loop_layers": [1, 2], "injection": "none", "mean_recurrence": 2, "norm_eps": 1e-6, "rope_theta": 1000.0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe-in.yaml").write_text(yaml.safe_dump(RECIPE))
    out = train(folder / "recipe-in.yaml", folder / "model", device="cpu")
    return diagnose_source(find_model_source(str(out)), "shell", documents=4)


def test_every_checkpoint_of_the_log_has_its_orbits(found: dict[str, Any]) -> None:
    assert [entry["step"] for entry in found["training"]] == list(range(1, 9))
    for entry in found["training"]:
        assert all(np.array(loop["orbits"]).shape == (4, 5, 2) for loop in entry["loops"].values())
    for name, loop in found["loops"].items():  # the last checkpoint is the model, on other documents
        assert found["training"][-1]["loops"][name]["contraction_rate"] == pytest.approx(loop["contraction_rate"], rel=0.5)


def test_every_picture_is_written(found: dict[str, Any], tmp_path: Path) -> None:
    written = write_dynamics(found, "tiny", tmp_path)
    names = ("orbits", "steps", "orbits-in-training", "training")
    assert [path.name for path in written] == [f"{name}-tiny.{ending}" for name in names for ending in ("svg", "png")]


def test_a_panel_a_loop_shows_what_was_measured(found: dict[str, Any]) -> None:
    drawn = [axes.lines[0].get_xydata() for axes in orbits(found, "tiny").axes]
    np.testing.assert_array_equal(drawn, [loop["orbits"][0] for loop in found["loops"].values()])
    lengths = [axes.lines[0].get_ydata() for axes in steps(found, "tiny").axes[:2]]
    np.testing.assert_array_equal(lengths, [loop["step_norm"] for loop in found["loops"].values()])


def test_training_is_drawn_checkpoint_by_checkpoint(found: dict[str, Any]) -> None:
    in_training, over_time = orbits_in_training(found, "tiny"), training(found, "tiny")
    assert in_training is not None and over_time is not None
    assert len(in_training.axes) == 2 * CHECKPOINTS
    ratio = [entry["drift_to_loop"]["group 1 -> group 2"] for entry in found["training"]]
    np.testing.assert_array_equal(over_time.axes[3].lines[0].get_ydata(), ratio)


def test_a_model_without_a_log_has_no_pictures_of_training(found: dict[str, Any], tmp_path: Path) -> None:
    alone = found | {"training": logged(tmp_path)}
    assert orbits_in_training(alone, "tiny") is None and training(alone, "tiny") is None
    assert len(write_dynamics(alone, "tiny", tmp_path)) == 4


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"step": 3, "dynamics": {}}',
        '{"step": "x", "dynamics": {"loops": {}, "drift_to_loop": {}}}',
        '{"step": 3, "dynamics": {"loops": {"core": {"cosine": 1}}, "drift_to_loop": {}}}',
        '{"step": 3, "dynamics": {"loops": {}}}',
    ],
)
def test_a_log_that_is_none_is_one_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "log.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match="is not a training log"):
        logged(tmp_path)
