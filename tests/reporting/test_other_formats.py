import json
import re
from dataclasses import replace

import pytest

from halting_bench.analysis.comparison import Difference
from halting_bench.analysis.gate import Judgement, Verdict
from halting_bench.analysis.rules import GateRule
from halting_bench.errors import UserError
from halting_bench.reporting.benchmark_json import github_benchmark, lm_eval_results
from halting_bench.reporting.formats import export_run
from halting_bench.reporting.github import ANNOTATIONS, annotations, job_summary, tell_github
from halting_bench.reporting.junit import write_junit
from halting_bench.reporting.pdf import figures_pdf
from halting_bench.reporting.siunitx import render_siunitx
from halting_bench.reporting.table import Column, Interval, Kind, Row, Table
from halting_bench.reporting.tables import iso


def judgement(verdict, *, policy="kl", softened=False, reason="the change\nis 5 % too much"):
    rule = GateRule.model_validate({"quantity": "quality", "margin": 0.01, "policy": policy})
    return Judgement(rule, "m", "b", policy, verdict, Difference(1, 2, 1, 0.5, 1.5), 0.01, reason, softened=softened)


def test_siunitx_aligns_numbers_and_braces_the_rest():
    columns = (
        Column("a", "a_b"),
        Column("d", "depth", Kind.DEPTH),
        Column("t", "threshold", Kind.THRESHOLD),
        Column("q", "q", Kind.QUALITY, interval=True),
    )
    rows = (
        Row(("kl", 12.345, 1e-5, Interval(0.5, 0.4, 0.6)), best=frozenset({1})),
        Row(("x", None, 0.25, Interval(0.5, float("nan"), float("nan")))),
    )
    text = render_siunitx(Table("t", "T", columns, rows))
    assert r"\begin{tabular}{lS[table-format=2.2]S[table-format=1.2e2]r}" in text
    assert r"{a\_b} & {depth}" in text
    assert r"kl & \bfseries 12.35 & 1e-5 & \num{0.500} {[}\num{0.400}, \num{0.600}{]} \\" in text or "12.34" in text
    assert r"x & {--} & 0.25 & 0.500 \\" in text


def test_siunitx_renders_the_tables_of_a_run(executed_run):
    text = render_siunitx(iso(executed_run, "huginn-tiny", "docs"))
    assert text.count("{") == text.count("}")


def test_the_benchmark_action_gets_numbers_that_are_better_when_smaller(executed_run):
    run = replace(executed_run, iso=executed_run.iso.assign(flops_per_token=1e6))
    entries = json.loads(github_benchmark(run))
    names = [entry["name"] for entry in entries]
    assert len(names) == len(set(names))
    assert {"core steps/token", "FLOP/token", "ms/token"} == {entry["unit"] for entry in entries}
    assert all(entry["value"] == entry["value"] and "threshold" in entry["extra"] for entry in entries)


def test_lm_eval_shaped_results_carry_metric_and_stderr_by_task(executed_run):
    document = json.loads(lm_eval_results(executed_run))
    task = document["results"]["huginn-tiny/docs@kl"]
    assert {"bits_per_byte,none", "bits_per_byte_stderr,none", "mean_depth,none"} < set(task)
    assert set(document["results"]) == set(document["configs"]) == set(document["n-samples"])


def test_the_figures_are_one_pdf_without_a_date(run):
    data = figures_pdf(run)
    assert data.startswith(b"%PDF-")
    assert b"CreationDate" not in data
    assert len(re.findall(rb"/Type /Page\b", data)) == 2 * 5  # nothing was timed


def test_junit_tells_failures_from_what_could_not_be_judged(tmp_path):
    from junitparser import Error, Failure, JUnitXml, Skipped

    judgements = [
        judgement(Verdict.PASS, reason=""),
        judgement(Verdict.FAIL, reason="bad \x00 <byte>"),
        judgement(Verdict.INCONCLUSIVE),
        judgement(Verdict.INCOMPARABLE, softened=True),
    ]
    write_junit(tmp_path / "junit.xml", judgements)
    (suite,) = JUnitXml.fromfile(str(tmp_path / "junit.xml"))
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (4, 1, 1, 1)
    assert [type(case.result[0]) if case.result else None for case in suite] == [None, Failure, Error, Skipped]


def test_annotations_stay_inside_githubs_limit_and_on_one_line():
    lines = annotations(
        [judgement(Verdict.FAIL, policy=f"p{i}") for i in range(30)] + [judgement(Verdict.INCONCLUSIVE, softened=True)]
    )
    assert sum(line.startswith("::error ") for line in lines) == ANNOTATIONS
    assert "21 more" in lines[ANNOTATIONS - 1]
    assert lines[-1].startswith("::warning ")
    assert "%0A" in lines[0] and "5 %25" in lines[0] and "\n" not in "".join(lines)


def test_the_summary_shows_the_gravest_rows_that_fit():
    judged = [judgement(Verdict.PASS, policy=f"p{i}", reason="") for i in range(200)] + [judgement(Verdict.FAIL)]
    whole, part = job_summary(judged), job_summary(judged, room=4000)
    assert whole.count("\n|") > 200
    assert len(part.encode()) <= 4000
    assert "FAIL" in part and "did not fit" in part
    assert job_summary(judged, room=10) == ""


def test_github_is_only_told_when_it_is_there(tmp_path):
    file = tmp_path / "summary.md"
    assert tell_github([judgement(Verdict.FAIL)], {}) == []
    lines = tell_github([judgement(Verdict.FAIL)], {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(file)})
    assert len(lines) == 1 and "1 FAIL" in file.read_text()


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_a_pass_is_quiet(verdict):
    assert bool(annotations([judgement(verdict)])) is (verdict is not Verdict.PASS)


def test_a_report_knows_every_format_and_names_the_nearest(run):
    assert export_run(run, "siunitx", "iso").startswith(rb"\begin{table}")
    assert export_run(run, "html").startswith(b"<!doctype html>")
    with pytest.raises(UserError, match="did you mean 'siunitx'"):
        export_run(run, "siunitxx")
    with pytest.raises(UserError, match="leave --table out"):
        export_run(run, "html", "iso")
    with pytest.raises(UserError, match="no table's name contains 'nothing'"):
        export_run(run, "md", "nothing")
