"""The page in a real browser: a script in it works the controls and writes down what it saw."""

import html
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from halting_bench.reporting.html import report_page, tables_page
from halting_bench.reporting.table import Column, Kind, Row, Table

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
in_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: apt-get install chromium")
WIDTHS = {"phone": 390, "desktop": 1280}

PROBE = """
<script>
const errors = [];
window.addEventListener("error", (event) => errors.push(String(event.message)));
</script>
"""

ACT = """
<script>
const seen = { ready: Number(document.documentElement.dataset.ready), width: innerWidth };
const count = () => document.querySelectorAll("#pareto .mark").length;
const pick = (id, value) => { const e = document.getElementById(id); e.value = value; e.dispatchEvent(new Event("change")); };
const tick = (id) => document.getElementById(id).click();
const ticks = () => [...document.querySelectorAll("#pareto text")].map((t) => t.textContent).join("|");
const press = (key) => document.getElementById("pareto").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
seen.overflow = document.documentElement.scrollWidth > document.documentElement.clientWidth;
seen.marks = count();
document.getElementById("none").click(); seen.none = count();
document.getElementById("all").click(); seen.all = count();
seen.hollow = document.querySelectorAll('#pareto .mark[fill="var(--panel)"]').length;
const box = document.querySelector('#policies input[value="latent-diff"]'); box.click(); seen.without = count();
box.click();
seen.linear = ticks(); tick("log-x"); seen.log = ticks(); tick("log-x");
pick("axis", "flops_per_token"); seen.flops = document.getElementById("pareto").getAttribute("aria-label");
seen.axes = [...document.getElementById("axis").options].map((o) => o.value);
pick("axis", "mean_depth");
press("ArrowRight"); seen.said = document.getElementById("said").textContent;
press("ArrowDown"); seen.next = document.getElementById("said").textContent;
press("Escape"); seen.hidden = document.getElementById("pareto-tip").hidden;
const mark = document.querySelectorAll("#pareto .mark")[3].getBoundingClientRect();
document.getElementById("pareto").dispatchEvent(new PointerEvent("pointermove", {
  clientX: mark.x + mark.width / 2, clientY: mark.y + mark.height / 2, bubbles: true }));
seen.tip = document.getElementById("pareto-tip").hidden ? "" : document.getElementById("pareto-tip").textContent;
pick("pair", 1); seen.other = document.getElementById("pareto").getAttribute("aria-label");
seen.tokens = document.querySelectorAll("#text span").length;
seen.coloured = [...document.querySelectorAll("#text span")].filter((s) => s.style.background).length;
seen.text = document.getElementById("text").textContent;
seen.convergence = document.querySelectorAll("#convergence path").length;
const table = [...document.querySelectorAll("table.sortable")].find((t) => t.id.startsWith("iso"));
const column = [...table.querySelectorAll("th")].findIndex((h) => h.textContent === "mean depth");
const cells = () => [...table.tBodies[0].rows].map((r) => r.cells[column].dataset.value);
table.querySelectorAll("th button")[column].click(); seen.ascending = cells();
table.querySelectorAll("th button")[column].click(); seen.descending = cells();
seen.unlabelled = [...document.querySelectorAll("input, select, button")].filter(
  (e) => !(e.labels && e.labels.length) && !e.textContent.trim()).length;
seen.remote = performance.getEntriesByType("resource").length;
seen.errors = errors;
document.title = "done";
const out = document.createElement("pre"); out.id = "seen"; out.textContent = JSON.stringify(seen); document.body.append(out);
</script>
"""


@pytest.fixture(scope="session")
def reported(executed_run):
    """The executed run with a text and a machine."""
    words = ["the ", "quick ", "brown ", "fox ", "\N{LATIN SMALL LETTER E WITH ACUTE}", "<b>"]
    texts = pd.DataFrame({
        "model": "huginn-tiny", "benchmark": "docs", "seed": 0, "policy": np.repeat(["kl", "latent-diff"], len(words)),
        "place": [*range(len(words))] * 2, "token": words * 2, "exit_step": [1, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2, 1],
    })  # fmt: skip
    environment = {"commit": "abc", "dirty": True, "device": {"type": "cpu", "threads": 2}, "cpu": {"model": "x", "cores": 2}}
    latency = executed_run.latency.assign(status="ok")
    return replace(executed_run, texts=texts, latency=latency, manifest={"schema_version": 1, "environment": environment})


@pytest.fixture(scope="session")
def page(reported):
    return report_page(reported)


def visit(page: str, width: int, folder) -> dict:
    """What the script saw in a frame of that width. A frame, because a window has a least width of its own."""
    inner = page.replace("<body>", "<body>" + PROBE, 1).replace("</body>", ACT + "</body>", 1)
    outer = folder / "outer.html"
    frame = f'<iframe id="f" style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(inner)}"></iframe>'
    copy = """<script>document.getElementById("f").onload = (e) => {
      document.body.append(Object.assign(document.createElement("pre"), { id: "copy",
        textContent: e.target.contentDocument.getElementById("seen")?.textContent ?? "nothing" })); };</script>"""
    outer.write_text(f"<!doctype html><meta charset=utf-8><body>{frame}{copy}</body>", encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}/profile"]
    flags += ["--enable-logging=stderr", "--virtual-time-budget=10000", f"--window-size={max(width, 600)},1000", "--dump-dom"]
    done = subprocess.run([str(BROWSER), *flags, outer.as_uri()], capture_output=True, text=True, timeout=300, check=True)
    found = re.search(r'<pre id="copy">(.*?)</pre>', done.stdout, re.S)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert found, (done.stdout[-2000:], console)
    seen = json.loads(html.unescape(found[1]))
    seen["console"] = console
    return seen


@pytest.fixture(scope="session", params=WIDTHS)
def seen(request, page, tmp_path_factory):
    if BROWSER is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    return visit(page, WIDTHS[request.param], tmp_path_factory.mktemp("browser"))


def test_the_page_loads_without_an_error_and_without_the_network(seen):
    assert seen["errors"] == [] and seen["console"] == []
    assert seen["remote"] == 0
    assert seen["width"] in WIDTHS.values()


def test_nothing_is_wider_than_the_screen(seen):
    assert not seen["overflow"]


def test_policies_can_be_shown_and_hidden(seen):
    assert seen["none"] == 0
    assert seen["marks"] < seen["all"]
    assert 0 < seen["without"] < seen["all"]


def test_what_was_acted_out_is_hollow_and_what_was_replayed_is_filled(seen, page):
    points = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])["pairs"][0]["points"]
    assert 0 < seen["hollow"] == points["evidence"].count("executed") < seen["all"]


def test_a_footnote_of_several_summaries_stands_once(reported):
    twice = {
        name: pd.concat([frame, frame.replace("huginn-tiny", "another")], ignore_index=True)
        for name, frame in (("points", reported.points), ("iso", reported.iso))
    }
    page = report_page(replace(reported, **twice, texts=pd.DataFrame(), latency=pd.DataFrame()))
    assert page.count("the best halting policy on each benchmark</caption>") == 2
    assert page.count('<p class="note">Best policy') == 1


def test_the_axes_switch_to_logarithms_and_to_other_costs(seen):
    assert seen["linear"] != seen["log"]
    assert "FLOPs a token" in seen["flops"]
    assert seen["axes"] == ["mean_depth", "flops_per_token", "latency_ms_per_token"]


def test_the_keyboard_reads_every_point_aloud(seen):
    assert "mean depth" in seen["said"]
    assert seen["next"].partition(",")[0] != seen["said"].partition(",")[0]
    assert seen["hidden"]


def test_the_pointer_shows_threshold_and_interval(seen):
    assert re.search(r"\[.*, .*\]", seen["tip"]) and "mean depth" in seen["tip"]


def test_another_benchmark_redraws_everything(seen):
    assert "huginn-tiny on docs" in seen["other"]
    assert seen["tokens"] == seen["coloured"] == 6
    assert seen["text"] == "the quick brown fox \N{LATIN SMALL LETTER E WITH ACUTE}<b>"
    assert seen["convergence"] == 3


def test_tables_sort_by_number_and_keep_what_is_missing_last(seen):
    for name, reverse in (("ascending", False), ("descending", True)):
        known = [float(value) for value in seen[name] if value]
        assert known == sorted(known, reverse=reverse)
        assert "" not in seen[name][: len(known)]


def test_every_control_has_a_name(seen):
    assert seen["unlabelled"] == 0


def test_the_numbers_are_those_of_points_csv(page, reported, tmp_path):
    from halting_bench.sweeping.run import with_latency

    with_latency(reported.points, None).to_csv(tmp_path / "points.csv", index=False)
    csv = pd.read_csv(tmp_path / "points.csv")
    csv = csv[(csv["split"] == "test") & (csv["subset"] == "all") & (csv["status"] == "ok") & (csv["benchmark"] == "docs")]
    csv = csv[~csv["policy"].str.startswith("random@")]
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])["pairs"][1]
    points = data["points"]
    shown = {
        (data["policies"][policy], threshold, evidence): (depth, quality, low, high)
        for policy, threshold, evidence, depth, quality, low, high in zip(
            *(points[key] for key in ("policy", "threshold", "evidence", "mean_depth", "quality", "quality_lo", "quality_hi")),
            strict=True,
        )
    }
    columns = ["policy", "threshold", "evidence", "mean_depth", "quality", "quality_lo", "quality_hi"]
    wanted = {tuple(row[:3]): tuple(row[3:]) for row in csv[columns].itertuples(index=False, name=None)}
    assert shown == wanted
    assert all(math.isfinite(value) for row in wanted.values() for value in row)


def test_every_caveat_is_on_the_page(page):
    for text in (
        "gate-cdf: not applicable",
        "fixed-point-inf",
        "noisy latency: kl",
        "is optimistic",
        "uncommitted changes",
        "of rows"[:2],
    ):
        assert text in page


def test_names_and_data_cannot_break_out_of_the_page(reported):
    name = "</script><script>alert(1)</script>"
    nasty = replace(
        reported, points=reported.points.replace("huginn-tiny", name), iso=reported.iso.replace("huginn-tiny", name)
    )
    page = report_page(replace(nasty, texts=pd.DataFrame(), latency=pd.DataFrame()))
    assert "<script>alert" not in page


def test_a_page_of_tables_alone_needs_no_run():
    table = Table("t", "A <table>", (Column("a", "a"), Column("b", "b", Kind.COUNT)), (Row(("x", 1)), Row(("y", None))))
    page = tables_page("Tables", [table])
    assert "A &lt;table&gt;" in page and 'data-value=""' in page
