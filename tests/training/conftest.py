"""Writes recipes of a second's training."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tiny_recipe import TINY


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny recipe with changes, and returns its path."""

    def write_changed(**changes: object) -> Path:
        path = tmp_path / "recipe-in.yaml"
        path.write_text(yaml.safe_dump(TINY | changes))
        return path

    return write_changed
