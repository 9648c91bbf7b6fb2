"""What a table is before it has a format: raw values, what kind of number each column holds, and what stands out.

Every output format is rendered from this one object, so they cannot disagree.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import pandas as pd


class Kind(Enum):
    """How a column's values are written by the formats that people read."""

    TEXT = "text"
    COUNT = "count"
    THRESHOLD = "threshold"  # three significant digits
    QUALITY = "quality"  # in the metric's own unit
    DELTA = "delta"  # a signed difference of qualities
    DEPTH = "depth"  # core steps
    PERCENT = "percent"  # the raw value is a fraction
    MILLISECONDS = "milliseconds"
    RATIO = "ratio"

    @property
    def align(self) -> Literal["left", "right"]:
        return "left" if self is Kind.TEXT else "right"


class Interval(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    lo: float
    hi: float


Cell = str | int | float | Interval | None
"""A raw value; None and NaN mean that there is none."""


@dataclass(frozen=True)
class Column:
    """A column: `key` names it for machines, `header` and `unit` for people.

    An interval column holds `Interval`s and fills three keys: `key`, `key_lo`, `key_hi`. `best` says which of its values
    are emphasised: the largest, the smallest, or every interval that lies wholly above zero.
    """

    key: str
    header: str
    kind: Kind = Kind.TEXT
    unit: str = ""
    interval: bool = False
    best: Literal["max", "min", "positive"] | None = None

    @property
    def title(self) -> str:
        return f"{self.header} ({self.unit})" if self.unit else self.header

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, f"{self.key}_lo", f"{self.key}_hi") if self.interval else (self.key,)


@dataclass(frozen=True)
class Row:
    """A row: cells by position; the positions to emphasise; whether it is a control; whether a new group starts here."""

    cells: tuple[Cell, ...]
    best: frozenset[int] = frozenset()
    control: bool = False
    starts_group: bool = False


@dataclass(frozen=True)
class Table:
    """A table. `name` is its file name without an ending; the first `keys` columns tell its rows apart."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    footnotes: tuple[str, ...] = ()
    keys: int = 1

    def records(self) -> list[dict[str, Cell]]:
        """The raw values, one flat dict a row."""
        return [
            {key: value for column, cell in zip(self.columns, row.cells, strict=True) for key, value in _flat(column, cell)}
            for row in self.rows
        ]


def table_of(
    name: str, title: str, columns: Iterable[Column], frame: "pd.DataFrame", footnotes: Iterable[str] = (), keys: int = 1
) -> Table:
    """Takes a table's cells from a frame that has a column for every key.

    The frame's own columns `control` (bool) and `group` mark controls and groups, where it has them. Controls and rows
    whose `status` is not ok are never emphasised.
    """
    columns = tuple(columns)
    count = len(frame)
    control = frame["control"].tolist() if "control" in frame else [False] * count
    group = frame["group"].tolist() if "group" in frame else [None] * count
    status = frame["status"].tolist() if "status" in frame else ["ok"] * count
    eligible = [state == "ok" and not is_control for state, is_control in zip(status, control, strict=True)]
    cells = [_cells(frame, column) for column in columns]
    best = [_best(column, values, eligible) for column, values in zip(columns, cells, strict=True)]
    rows = tuple(
        Row(
            cells=tuple(values[i] for values in cells),
            best=frozenset(c for c, chosen in enumerate(best) if i in chosen),
            control=bool(control[i]),
            starts_group=i > 0 and group[i] != group[i - 1],
        )
        for i in range(count)
    )
    return Table(name, title, columns, rows, tuple(footnotes), keys)


def _cells(frame: "pd.DataFrame", column: Column) -> list[Cell]:
    if column.interval:
        return [Interval(*map(float, row)) for row in frame[list(column.keys)].itertuples(index=False, name=None)]
    native: Callable[[Any], Cell] = str if column.kind is Kind.TEXT else float
    return [None if value is None or value != value else native(value) for value in frame[column.key].tolist()]


def _best(column: Column, cells: list[Cell], eligible: list[bool]) -> set[int]:
    if column.best == "positive":
        return {i for i, cell in enumerate(cells) if eligible[i] and isinstance(cell, Interval) and cell.lo > 0}
    if column.best is None:
        return set()
    values = {i: _value(cell) for i, cell in enumerate(cells) if eligible[i] and math.isfinite(_value(cell))}
    if not values:
        return set()
    winner = (max if column.best == "max" else min)(values.values())
    return {i for i, value in values.items() if value == winner}


def _value(cell: Cell) -> float:
    if isinstance(cell, Interval):
        return cell.value
    return float(cell) if isinstance(cell, (int, float)) else math.nan


def _flat(column: Column, cell: Cell) -> Sequence[tuple[str, Cell]]:
    if not column.interval:
        return [(column.key, cell)]
    values = cell if isinstance(cell, Interval) else (cell, None, None)
    return list(zip(column.keys, values, strict=True))
