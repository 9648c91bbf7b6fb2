"""A recipe so small that it trains in a second."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

CONFIG = {
    "n_embd": 16, "n_heads": 2, "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 1, "n_layers_in_coda": 1,
    "intermediate_size": 16, "block_size": 128, "padded_vocab_size": 256, "mean_recurrence": 3, "norm_eps": 1e-6,
    "rope_base": 1000,
}  # fmt: skip
TINY = {"name": "tiny", "summary": "A test.", "config": CONFIG, "steps": 4, "mixture": [{"task": "shell"}]}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny recipe with changes, and returns its path."""

    def write_changed(**changes: object) -> Path:
        path = tmp_path / "recipe-in.yaml"
        path.write_text(yaml.safe_dump(TINY | changes))
        return path

    return write_changed
