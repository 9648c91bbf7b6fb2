import csv
import io
import json
import math

import pytest
from rich.console import Console

from halting_bench.errors import UserError
from halting_bench.reporting.exports import FORMATS, render, render_all, render_rich
from halting_bench.reporting.table import Column, Interval, Kind, Row, Table
from halting_bench.reporting.tables import summary_tables


@pytest.fixture
def table():
    columns = (
        Column("policy", "policy"),
        Column("quality", "accuracy ↑", Kind.QUALITY, interval=True),
        Column("share", "never fired", Kind.PERCENT, "%"),
        Column("note", "note"),
    )
    rows = (
        Row(("kl_1 & 100%", Interval(0.5, 0.4, 0.6), 0.25, "a|b *c* <i>"), best=frozenset({1})),
        Row(("fixed", Interval(math.inf, math.nan, math.nan), None, "{x}~^\\"), control=True, starts_group=True),
    )
    return Table("demo", "A $ title", columns, rows, ("≤ 5 # notes",))


def printed(table, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    render_rich(table, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(executed_run, width):
    for table in summary_tables(executed_run):
        assert max(map(len, printed(table, width).splitlines())) <= width


def test_columns_that_do_not_fit_continue_below_under_the_same_keys(executed_run):
    table = next(table for table in summary_tables(executed_run) if table.name == "iso-huginn-tiny-docs")
    text = printed(table, 80)
    words = set(text.split())
    assert {word for column in table.columns for word in column.title.split()} <= words
    assert text.count("step-ratio") >= 2
    ran = [row for row in table.rows if row.cells[3] is not None]
    assert all(f"{row.cells[2].value:.3f} [" in text and f"{row.cells[3]:.2f}" in text for row in ran)


def test_a_wide_terminal_shows_one_block(executed_run):
    table = next(table for table in summary_tables(executed_run) if table.name == "iso-huginn-tiny-docs")
    assert printed(table, 300).count("step-ratio") == 1


def test_csv_and_json_carry_the_raw_numbers(table):
    (first, second) = csv.DictReader(io.StringIO(render(table, "csv")))
    assert [first[key] for key in ("policy", "quality", "quality_lo", "share")] == ["kl_1 & 100%", "0.5", "0.4", "0.25"]
    assert second["quality"] == "inf"
    assert second["quality_lo"] == second["share"] == ""
    document = json.loads(render(table, "json"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["rows"][0]["quality_hi"] == 0.6
    assert document["rows"][1] == {
        "policy": "fixed",
        "quality": "inf",
        "quality_lo": None,
        "quality_hi": None,
        "share": None,
        "note": "{x}~^\\",
    }
    assert document["columns"][2]["unit"] == "fraction"


def test_latex_escapes_what_it_would_read_as_a_command(table):
    text = render(table, "tex")
    assert r"kl\_1 \& 100\% & \textbf{0.500 [0.400, 0.600]} & 25.0 & a\textbar{}b *c* $<$i$>$ \\" in text
    assert r"\emph{fixed} & inf & -- & \{x\}\textasciitilde{}\textasciicircum{}\textbackslash{} \\" in text
    assert r"\caption{A \$ title}" in text
    assert r"$\le$ 5 \# notes" in text
    assert text.count(r"\midrule") == 2
    assert text.count("{") == text.count("}")


def test_markdown_keeps_a_cell_a_cell(table):
    lines = render(table, "md").splitlines()
    (row,) = [line for line in lines if "kl_1" in line]
    assert "**0.500 [0.400, 0.600]**" in row
    assert r"a\|b \*c\* &lt;i>" in row
    assert row.replace(r"\|", "").count("|") == len(table.columns) + 1


def test_several_tables_are_one_json_list(table):
    assert [entry["name"] for entry in json.loads(render_all([table, table], "json"))] == ["demo", "demo"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_without_rows_renders(table, format):
    empty = Table(table.name, table.title, table.columns, ())
    assert "quality" in render(empty, format) or "accuracy" in render(empty, format)
    assert "policy" in printed(empty, 80)


def test_an_unknown_format_is_named_with_the_known_ones(table):
    with pytest.raises(UserError, match=r"unknown format 'markdown'.*csv, json, md, tex"):
        render(table, "markdown")
