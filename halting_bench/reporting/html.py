"""A run as one self-contained page: no network, no library. The pictures are drawn in the page from the data inside it."""

import html
import json
import math
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from halting_bench.reporting.caveats import caveats
from halting_bench.reporting.frames import is_control, of_pair, pairs, ranked, select, usual_setting
from halting_bench.reporting.style import COLOURS, MARKERS, ORACLE
from halting_bench.reporting.table import Cell, Interval, Kind, Table
from halting_bench.reporting.tables import summary_tables
from halting_bench.reporting.text import format_cell, metric_label
from halting_bench.store import Run

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 4  # policies drawn at first, beside uniform depth and the oracle: a page that opens with all of them shows none
_EXACT = ("threshold", "mean_depth", "flops_per_token", "quality", "quality_lo", "quality_hi", "never_fired_fraction")


def report_page(run: Run) -> str:
    """The page of a run."""
    tables = summary_tables(run)
    first = [table for table in tables if table.name.startswith("summary")]
    rest = [table for table in tables if not table.name.startswith("summary")]
    content = {"pairs": [_pair(run, model, benchmark) for model, benchmark in pairs(run)]}
    models = ", ".join(run.points["model"].drop_duplicates())
    body = [
        f"<h1>When to stop looping: {_escape(models)}</h1>",
        '<p class="lead">Quality against mean depth, FLOPs and latency of halting policies. Figures are of test documents; '
        "every choice was made on calibration documents.</p>",
        _caveats(caveats(run)),
        *(_table(table) for table in _each_note_once(first)),
        _asset("charts.html"),
        "<h2>All tables</h2>",
        *(f"<details><summary>{_escape(table.title)}</summary>{_table(table)}</details>" for table in rest),
        "<h2>Where these numbers were made</h2>",
        _facts(run),
    ]
    return _page(f"halting-bench: {models}", body, content)


def _each_note_once(tables: list[Table]) -> list[Table]:
    """The tables with each footnote below the last of those that have it."""
    later: set[str] = set()
    found = []
    for table in reversed(tables):
        found.append(replace(table, footnotes=tuple(note for note in table.footnotes if note not in later)))
        later.update(table.footnotes)
    return found[::-1]


def tables_page(title: str, tables: list[Table]) -> str:
    """Tables alone, sortable."""
    return _page(title, [f"<h1>{_escape(title)}</h1>", *(_table(table) for table in tables)], {"pairs": []})


def _page(title: str, body: list[str], content: dict[str, Any]) -> str:
    # "</script>" inside the data would end it, and so would "<!--"; JSON may write < as an escape anywhere in a string.
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_escape(title)}</title>",
            f'<link rel="icon" href="data:,"><style>{_asset("page.css")}</style></head><body><main>',
            *body,
            "</main>",
            f'<script type="application/json" id="data">{text}</script>',
            f"<script>{_asset('charts.js')}</script></body></html>",
            "",
        ]
    )


def _asset(name: str) -> str:
    return resources.files("halting_bench.reporting").joinpath("page", name).read_text(encoding="utf-8")


def _escape(text: str) -> str:
    return html.escape(text)


def _caveats(lines: list[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{_escape(line)}</li>" for line in lines)
    return f'<section class="caveats" aria-labelledby="caveats"><h2 id="caveats">Mind this</h2><ul>{items}</ul></section>'


def _table(table: Table) -> str:
    heads = []
    for column in table.columns:
        numeric = column.kind is not Kind.TEXT
        attributes = ' class="right" data-numeric="true"' if numeric else ""
        heads.append(f'<th scope="col"{attributes}><button type="button">{_escape(column.title)}</button></th>')
    rows = []
    for row in table.rows:
        cells = []
        for index, (column, cell) in enumerate(zip(table.columns, row.cells, strict=True)):
            classes = [*(["right"] if column.kind is not Kind.TEXT else []), *(["best"] if index in row.best else [])]
            told = f' class="{" ".join(classes)}"' if classes else ""
            value = f' data-value="{_sort_key(cell)}"' if column.kind is not Kind.TEXT else ""
            cells.append(f"<td{told}{value}>{_escape(format_cell(cell, column.kind))}</td>")
        rows.append(f"<tr{' class=control' if row.control else ''}>{''.join(cells)}</tr>")
    notes = "".join(f'<p class="note">{_escape(note)}</p>' for note in table.footnotes)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_escape(table.title)}"><table class="sortable" '
        f'id="{_escape(table.name)}"><caption>{_escape(table.title)}</caption><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{notes}"
    )


def _sort_key(cell: Cell) -> str:
    value = cell.value if isinstance(cell, Interval) else cell
    if value is None or isinstance(value, str) or math.isnan(value):
        return ""
    return repr(float(value)).replace("inf", "Infinity")


def _facts(run: Run) -> str:
    environment = run.manifest.get("environment", {})
    device, cpu = environment.get("device") or {}, environment.get("cpu") or {}
    commit = environment.get("commit")
    facts = {
        "run": run.manifest.get("run_id"),
        "commit": f"{commit}{' with uncommitted changes' if environment.get('dirty') else ''}" if commit else None,
        "device": device.get("name") or device.get("type"),
        "driver": device.get("driver"),
        "CPU": f"{cpu.get('model')}, {cpu.get('cores')} cores, {device.get('threads')} threads" if cpu else None,
        "dtype": environment.get("dtype"),
        "halting-bench": environment.get("halting_bench"),
        "Python": environment.get("python"),
        "system": environment.get("system"),
        **environment.get("versions", {}),
        **{f"model {each['model']}": each["model_hash"] for each in run.manifest.get("models", [])},
        **{f"benchmark {each['benchmark']}": each["benchmark_hash"] for each in run.manifest.get("benchmarks", [])},
    }
    known = "".join(
        f"<dt>{_escape(name)}</dt><dd>{_escape(str(value))}</dd>" for name, value in facts.items() if value is not None
    )
    return f'<dl class="facts">{known}</dl>'


def _pair(run: Run, model: str, benchmark: str) -> dict[str, Any]:
    """What the pictures of one (model, benchmark) are drawn from. Numbers are those of points.csv, unrounded."""
    import pandas as pd

    points = of_pair(run.points, model, benchmark)
    seed = points["seed"].min()
    points = points[points["seed"] == seed]
    kinds = [select(points, "test", evidence=kind).assign(kind=kind) for kind in ("replayed", "executed")]
    shown = pd.concat([rows for rows in kinds if len(rows)], ignore_index=True)
    shown = shown[~shown["policy"].str.startswith("random@")].reset_index(drop=True)
    policies = sorted(shown["policy"].unique(), key=lambda name: (name != "fixed", is_control(name), name))
    iso = of_pair(run.iso, model, benchmark)
    iso = iso[(iso["seed"] == seed) & (iso["status"] == "ok")]
    best = ranked(run, model, benchmark)[:_SHOWN]
    return {
        "name": f"{model} on {benchmark}",
        "label": metric_label(str(points["metric"].iloc[0]), bool(points["higher_is_better"].iloc[0])),
        "policies": policies,
        "shown": [name for name in policies if name in ("fixed", "oracle-loss", *best)],
        "looks": _looks(policies, best),
        "points": _points(shown, policies, _latency(run, model, benchmark, seed)),
        "curves": _curves(of_pair(run.curves, model, benchmark), seed),
        "iso": dict(zip(iso["policy"], _column(iso["threshold"]), strict=True)),
        "full_depth": float(iso["full_depth"].max()) if len(iso) else None,
        "convergence": _convergence(of_pair(run.convergence, model, benchmark), seed),
        "text": _text(of_pair(run.texts, model, benchmark)),
    }


def _looks(policies: list[str], best: list[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each policy: no two rules share both, and the best have the most distinct ones."""
    rules = [*best, *(name for name in policies if name not in best and not is_control(name))]
    found: dict[str, dict[str, Any]] = {
        name: {"colour": COLOURS[i % len(COLOURS)], "marker": MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]}
        for i, name in enumerate(rules)
    }
    found["fixed"] = {"colour": "var(--ink)", "marker": "o"}
    return found | {name: {"colour": ORACLE, "marker": "o", "dash": "6 4"} for name in policies if name not in found}


def _latency(run: Run, model: str, benchmark: str, seed: int) -> "pd.DataFrame":
    frame = of_pair(run.latency, model, benchmark)
    if not frame.empty and "status" in frame:
        frame = frame[(frame["status"] == "ok") & (frame["seed"] == seed)]
    setting = usual_setting(frame)
    return setting.rows(frame) if setting else frame


def _points(points: "pd.DataFrame", policies: list[str], latency: "pd.DataFrame") -> dict[str, list]:
    names = {"latency_ms_per_token": "latency_ms_per_token", "latency_ms_per_token_lo": "p10", "latency_ms_per_token_hi": "p90"}
    if latency.empty:
        points = points.assign(**dict.fromkeys([*names, "noisy"]))
    else:
        points = points.merge(latency[["policy", "threshold", *names, "noisy"]], on=["policy", "threshold"], how="left")
        untimed = (points["kind"] == "replayed") & (points["policy"] != "fixed")  # seconds are of what was acted out
        points.loc[untimed, [*names, "noisy"]] = None
    return {
        "policy": [policies.index(policy) for policy in points["policy"]],
        "evidence": points["kind"].tolist(),
        **{name: _column(points[name]) for name in _EXACT},
        **{name: _column(points[column]) for column, name in names.items()},
        "noisy": [value is True for value in points["noisy"]],
    }


def _curves(curves: "pd.DataFrame", seed: int) -> dict[str, dict[str, list]]:
    if curves.empty:
        return {}
    own = curves[(curves["split"] == "test") & (curves["seed"] == seed)].sort_values("mean_depth", kind="stable")
    return {
        str(policy): {name: _rounded(part[name]) for name in ("mean_depth", "quality")}
        for policy, part in own.groupby("policy")
    }


def _convergence(frame: "pd.DataFrame", seed: int) -> dict[str, dict[str, list]]:
    if frame.empty:
        return {}
    own = frame[frame["seed"] == seed].sort_values("step")
    names = ("step", "median", "p10", "p90")
    return {str(signal): {name: _rounded(part[name]) for name in names} for signal, part in own.groupby("signal")}


def _text(frame: "pd.DataFrame") -> dict[str, Any] | None:
    """A document's tokens, and how many loops each took under each policy; None where the run kept no text."""
    if frame.empty:
        return None
    first = frame[frame["seed"] == frame["seed"].min()]
    tokens = first.drop_duplicates("place").sort_values("place")
    exits = {
        str(policy): [None if value != value else int(value) for value in part.sort_values("place")["exit_step"]]
        for policy, part in first.groupby("policy", sort=False)
    }
    return {"tokens": tokens["token"].tolist(), "exits": exits}


def _column(values: "pd.Series") -> list[float | None]:
    return [float(value) if value is not None and math.isfinite(value) else None for value in values.tolist()]


def _rounded(values: "pd.Series") -> list[float | None]:
    """Six significant digits: more than a screen can show."""
    return [None if value is None else float(f"{value:.6g}") for value in _column(values)]
