r"""A table for LaTeX with siunitx: numbers aligned at their decimal points, intervals in brackets.

Needs `\usepackage{siunitx, booktabs}`, and `\sisetup{detect-weight}` for the numbers in bold.
"""

import re

from halting_bench.reporting.exports import latex_escape, latex_frame
from halting_bench.reporting.table import Column, Interval, Kind, Row, Table
from halting_bench.reporting.text import format_cell

_NUMBER = re.compile(r"([-+]?)(\d+)(?:\.(\d+))?(?:e(-?\d+))?")


def render_siunitx(table: Table) -> str:
    """One `table` environment. What is no number in a column of numbers stands in braces."""
    body = [[_cell(row, index, column) for index, column in enumerate(table.columns)] for row in table.rows]
    lines: list[str] = []
    for row, cells in zip(table.rows, body, strict=True):
        if row.starts_group and lines:
            lines.append(r"\midrule")
        lines.append(" & ".join(cells) + r" \\")
    head = " & ".join(f"{{{latex_escape(column.title)}}}" for column in table.columns)
    return latex_frame(table, "".join(_alignment(table, index) for index in range(len(table.columns))), head, lines)


def _plain(column: Column) -> bool:
    """Whether a column can be aligned by siunitx: one number a cell."""
    return column.kind is not Kind.TEXT and not column.interval


def _alignment(table: Table, index: int) -> str:
    column = table.columns[index]
    if not _plain(column):
        return column.kind.align[0]
    found = [_NUMBER.fullmatch(_number(format_cell(row.cells[index], column.kind))) for row in table.rows]
    known = [match for match in found if match]
    if not known:
        return "c"
    sign = "-" if any(match[1] for match in known) else ""
    whole = max(len(match[2]) for match in known)
    decimals = max(len(match[3] or "") for match in known)
    power = max(len(match[4] or "") for match in known)
    return f"S[table-format={sign}{whole}{f'.{decimals}' if decimals else ''}{f'e{power}' if power else ''}]"


def _number(text: str) -> str:
    return text.replace(",", "")


def _cell(row: Row, index: int, column: Column) -> str:
    cell = row.cells[index]
    text = format_cell(cell, column.kind)
    bold = r"\bfseries " if index in row.best else ""
    if column.kind is Kind.TEXT:
        return bold + latex_escape(text)
    if _plain(column):
        return bold + (_number(text) if _NUMBER.fullmatch(_number(text)) else f"{{{latex_escape(text)}}}")
    parts = re.fullmatch(r"(\S+) \[(\S+), (\S+)\]", text) if isinstance(cell, Interval) else None
    if not parts or not all(_NUMBER.fullmatch(part) for part in parts.groups()):
        return bold + latex_escape(text)
    value, low, high = (rf"\num{{{part}}}" for part in parts.groups())
    return rf"{bold}{value} {{[}}{low}, {high}{{]}}"
