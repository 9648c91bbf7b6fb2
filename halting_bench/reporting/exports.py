"""One table, five renderings: the terminal, Markdown, CSV, LaTeX and JSON.

Markdown, LaTeX and the terminal show formatted numbers; CSV and JSON carry the raw ones.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from halting_bench.errors import unknown_name
from halting_bench.reporting.table import Cell, Column, Kind, Row, Table
from halting_bench.reporting.text import format_cell

if TYPE_CHECKING:
    from rich.console import Console

_GAP = 2  # blank columns between two columns in a terminal


def render(table: Table, format: str) -> str:
    """Renders one table as `md`, `csv`, `tex` or `json`. Raises UserError for any other format."""
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    return FORMATS[format](table)


def render_all(tables: Sequence[Table], format: str) -> str:
    """Renders several tables as one document: one JSON list, or the renderings one below the other."""
    if format == "json":
        return json.dumps([_json_value(table) for table in tables], indent=2, ensure_ascii=False) + "\n"
    return "\n".join(render(table, format) for table in tables)


def render_rich(table: Table, console: "Console") -> None:
    """Prints a table that is never wider than the console.

    Columns that do not fit continue in a block below that repeats the key columns, so that nothing is cut or hidden.
    """
    from rich.text import Text

    console.print(Text(table.title, style="bold"))
    blocks = _blocks(table, console.width)
    for block in blocks:
        console.print(_rich_block(table, block))
    for note in table.footnotes:
        console.print(Text(note, style="dim"), soft_wrap=False)
    console.print()


def _width(table: Table, index: int) -> int:
    column = table.columns[index]
    body = [len(format_cell(row.cells[index], column.kind)) for row in table.rows]
    return max([*body, *(len(word) for word in column.title.split())])


def _blocks(table: Table, width: int) -> list[list[tuple[int, int]]]:
    """Splits the columns into blocks of (column, width) that fit, each beginning with the key columns."""
    wanted = [_width(table, index) for index in range(table.keys)]
    limit = width // 2 if sum(wanted) + _GAP * table.keys > 0.6 * width else width
    keys = [(index, min(room, limit // table.keys - _GAP)) for index, room in enumerate(wanted)]
    taken = sum(room + _GAP for _, room in keys)
    blocks, block, used = [], list(keys), taken
    for index in range(table.keys, len(table.columns)):
        room = min(_width(table, index), width - taken)
        if used + room > width and len(block) > table.keys:
            blocks.append(block)
            block, used = list(keys), taken
        block.append((index, room))
        used += room + _GAP
    return [*blocks, block]


def _rich_block(table: Table, block: list[tuple[int, int]]) -> object:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, width in block:
        column = table.columns[index]
        grid.add_column(Text(column.title), justify=column.kind.align, width=width, vertical="bottom", overflow="fold")
    for position, row in enumerate(table.rows):
        following = table.rows[position + 1 : position + 2]
        cells = [
            Text(format_cell(row.cells[index], table.columns[index].kind), style="bold green" if index in row.best else "")
            for index, _ in block
        ]
        grid.add_row(*cells, style="dim" if row.control else "", end_section=any(r.starts_group for r in following))
    return grid


def _formatted(
    table: Table, escape: Callable[[str], str], emphasise: Callable[[str], str], mute: Callable[[str], str]
) -> list[list[str]]:
    def cell(row: Row, index: int, column: Column) -> str:
        text = escape(format_cell(row.cells[index], column.kind))
        if index in row.best:
            return emphasise(text)
        return mute(text) if row.control and index == 0 and text else text

    return [[cell(row, i, column) for i, column in enumerate(table.columns)] for row in table.rows]


def _markdown(table: Table) -> str:
    from tabulate import tabulate

    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("\n", " ")

    body = _formatted(table, escape, lambda text: f"**{text}**", lambda text: f"*{text}*")
    grid = tabulate(
        body,
        headers=[escape(column.title) for column in table.columns],
        tablefmt="pipe",
        colalign=[column.kind.align for column in table.columns] if body else None,
        disable_numparse=True,
    )
    notes = "".join(f"\n{escape(note)}\n" for note in table.footnotes)
    return f"### {escape(table.title)}\n\n{grid}\n{notes}"


def _csv(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([key for column in table.columns for key in column.keys])
    for record in table.records():
        writer.writerow(["" if _missing(value) else value for value in record.values()])
    return out.getvalue()


_TEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"$<$",
    ">": r"$>$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "–": "--",
    "≤": r"$\le$",
    "−": r"$-$",
}


def latex_escape(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text.replace("\n", " "))


def _latex(table: Table) -> str:
    body = _formatted(table, latex_escape, lambda text: rf"\textbf{{{text}}}", lambda text: rf"\emph{{{text}}}")
    lines: list[str] = []
    for row, cells in zip(table.rows, body, strict=True):
        if row.starts_group and lines:
            lines.append(r"\midrule")
        # A row that opens with a bracket would be read as the optional argument of the \\ before it.
        lines.append(("{}" if cells[0].startswith("[") else "") + " & ".join(cells) + r" \\")
    head = " & ".join(latex_escape(column.title) for column in table.columns)
    return latex_frame(table, "".join(column.kind.align[0] for column in table.columns), head, lines)


def latex_frame(table: Table, alignment: str, head: str, lines: list[str]) -> str:
    """A booktabs table around finished lines, with the table's title, label and footnotes."""
    notes = [rf"\par\footnotesize {latex_escape(note)}" for note in table.footnotes]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex_escape(table.title)}}}",
            rf"\label{{tab:{table.name}}}",
            rf"\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
            rf"{head} \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            *notes,
            r"\end{table}",
            "",
        ]
    )


def _missing(value: Cell) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _json_cell(value: Cell) -> Cell:
    # JSON has no infinity: it is named, so that an infinite loss does not read as a missing one.
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return None if _missing(value) else value


def _raw_unit(column: Column) -> str:
    return "fraction" if column.kind is Kind.PERCENT else column.unit


def _json_value(table: Table) -> dict:
    return {
        "name": table.name,
        "title": table.title,
        "columns": [
            {"key": column.key, "header": column.header, "kind": column.kind.value, "unit": _raw_unit(column)}
            for column in table.columns
        ],
        "rows": [{key: _json_cell(value) for key, value in record.items()} for record in table.records()],
        "footnotes": list(table.footnotes),
    }


def _json(table: Table) -> str:
    return json.dumps(_json_value(table), indent=2, ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Table], str]] = {"md": _markdown, "csv": _csv, "tex": _latex, "json": _json}
