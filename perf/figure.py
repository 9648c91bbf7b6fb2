"""One measured figure, as results/perf.json has it."""

from typing import Any


def figure(
    name: str, value: float | None, unit: str, target: str | None, command: str, *, device: str = "cpu, 1 thread"
) -> dict[str, Any]:
    """A row for `make perf`.

    Args:
        name: what was measured, with the size of the sample where it is one.
        value: None where it could not be measured here.
        unit: of value and target.
        target: such as `<= 3` or `>= 1000`; None where a number is only shown.
        command: that measures it again.
        device: what it ran on.
    """
    row = {"name": name, "value": value, "unit": unit, "target": None, "holds": None, "device": device, "command": command}
    if target is None:
        return row
    relation, limit = target.split()
    bound = float(limit)
    held = {
        "<=": lambda v: v <= bound,
        ">=": lambda v: v >= bound,
        "<": lambda v: v < bound,
        ">": lambda v: v > bound,
        "==": lambda v: v == bound,
    }[relation]
    return row | {"target": target, "holds": None if value is None else bool(held(value))}
