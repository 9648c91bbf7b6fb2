"""Models whose steps take as long as a test says, by a clock of their own."""

from pathlib import Path

from halting_bench.timing.clock import FakeClock

STEPS = FakeClock()
"""Stands still but for the steps of these models."""


def stepping(file: Path, seconds: str) -> str:
    """Writes the documented model with steps of so many seconds, an expression. Returns what to type for it."""
    place = "        q, k, v = "
    text = (Path(__file__).parents[1] / "docs" / "my_model.py").read_text()
    told = text.replace(place, f"        STEPS.advance({seconds})\n{place}")
    file.write_text(f"from tests.stepping_models import STEPS\n{told}")
    return f"{file}@MyLoopedModel"
