"""The commands as a user types them: exit codes, one-line errors, and files."""

import shutil

import pandas as pd
import pytest
from typer.testing import CliRunner

from halting_bench.cli.main import app
from halting_bench.errors import UserError
from tests.analysis.simulated_run import Simulated, write_run

RULES = "rules: [{quantity: quality, margin: 0.02, policy: latent-diff, other_model: true}]"
runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "base", Simulated(documents=60, tokens=15))
    write_run(folder / "weak", Simulated(documents=60, tokens=15, weaker=0.1, model_hash="cccc"))
    (folder / "gate.yaml").write_text(RULES)
    return folder


def gate(folder, head, *more):
    arguments = ["gate", str(folder / head), "--baseline", str(folder / "base"), "--rules", str(folder / "gate.yaml"), *more]
    return runner.invoke(app, arguments)


def test_gate_ends_with_0_where_nothing_got_worse_and_with_1_where_something_did(folder, tmp_path):
    good = gate(folder, "base", "--format", "md")
    bad = gate(folder, "weak", "--format", "md", "--junit", str(tmp_path / "j.xml"))
    assert (good.exit_code, bad.exit_code) == (0, 1)
    assert "1 PASS" in good.stdout and "1 FAIL" in bad.stdout
    assert "<failure" in (tmp_path / "j.xml").read_text()


def test_gate_makes_a_baseline_only_when_told_to(folder, tmp_path):
    new = tmp_path / "new"
    arguments = ["gate", str(folder / "weak"), "--baseline", str(new), "--update-baseline"]
    assert runner.invoke(app, arguments).exit_code == 0
    assert (new / "points.parquet").exists()


def test_gate_without_a_point_prints_the_sweep_that_has_it(folder, tmp_path):
    (tmp_path / "gate.yaml").write_text(RULES.replace("latent-diff", "kl, threshold: 0.125"))
    arguments = ["gate", str(folder / "weak"), "--baseline", str(folder / "base"), "--rules", str(tmp_path / "gate.yaml")]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 5
    assert f"--like {folder / 'base'}" in done.stderr


def test_a_half_written_run_is_one_line(folder, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(folder / "base", half)
    (half / "points.parquet").unlink()
    for arguments in (
        ["compare", str(folder / "base"), str(half)],
        ["report", str(half)],
        ["calibrate", str(half), "--max-loss", "1"],
    ):
        error = runner.invoke(app, arguments).exception
        assert isinstance(error, UserError) and "not finished" in str(error) and "\n" not in str(error)


def rewritten(folder, head, name, change):
    """A copy of the base, with a table changed."""
    shutil.copytree(folder / "base", head)
    change(pd.read_parquet(head / f"{name}.parquet")).to_parquet(head / f"{name}.parquet", index=False)
    return str(head)


def test_a_run_without_points_is_an_error_and_not_an_empty_report(folder, tmp_path):
    bare = rewritten(folder, tmp_path / "bare", "points", lambda points: points.iloc[:0])
    error = runner.invoke(app, ["report", bare]).exception
    assert isinstance(error, UserError) and "nothing was measured" in str(error)


def test_documents_without_tokens_are_no_documents_and_every_format_says_so(folder, tmp_path):
    silent = rewritten(folder, tmp_path / "silent", "per_document", lambda documents: documents.assign(n_tokens=0))
    assert gate(folder, tmp_path / "silent").exit_code == 5
    for format in ("csv", "md"):
        told = runner.invoke(app, ["compare", str(folder / "base"), silent, "--format", format]).stdout
        assert "Not compared" in told and "so ask for" not in told


@pytest.mark.parametrize("format", ["md", "csv", "tex", "json", "html"])
def test_compare_speaks_every_format(folder, format):
    done = runner.invoke(app, ["compare", str(folder / "base"), str(folder / "weak"), "--format", format])
    assert done.exit_code == 0, done.exception
    assert "aaaa" in done.stdout and "cccc" in done.stdout  # the models' hashes, among what changed


def test_calibrate_and_recommend_end_in_a_deployment_file(folder, tmp_path):
    asked = [str(folder / "base"), "--max-loss", "0.2", "--confidence", "0.8"]
    assert "latent-diff" in runner.invoke(app, ["calibrate", *asked, "--format", "md"]).stdout
    done = runner.invoke(app, ["recommend", *asked, "--out", str(tmp_path / "d.yaml")])
    assert done.exit_code == 0, done.exception
    assert "threshold:" in (tmp_path / "d.yaml").read_text()
