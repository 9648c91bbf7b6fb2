import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib
import pandas as pd
import pytest

from halting_bench.errors import UserError
from halting_bench.reporting.pdf import figures_pdf
from halting_bench.reporting.plots import PLOTS, write_plots
from halting_bench.reporting.style import looks
from halting_bench.reporting.write import write_all


@pytest.fixture(scope="module")
def small(run):
    """One benchmark and few rules: enough to draw."""
    names = {"kl", "margin", "entropy-and-kl", "fixed-point-inf"}
    keep = names | {"fixed", "oracle-loss"} | {f"random@{name}" for name in names}
    frames = {name: getattr(run, name) for name in ("points", "iso", "curves", "exits")}
    chosen = {name: f[(f["benchmark"] == "docs") & f["policy"].isin(keep)] for name, f in frames.items()}
    convergence = run.convergence[(run.convergence["benchmark"] == "docs") & run.convergence["signal"].isin(names)]
    return replace(run, **chosen, convergence=convergence)


@pytest.fixture(scope="module")
def written(small, tmp_path_factory):
    return write_plots(small, tmp_path_factory.mktemp("plots"))


def test_every_plot_is_written_as_svg_and_png(written):
    drawn = [name for name in PLOTS if name != "quality-against-latency"]  # nothing was timed
    assert sorted(path.name for path in written) == sorted(f"{n}-huginn-tiny-docs.{e}" for n in drawn for e in ("png", "svg"))
    for path in written:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def test_the_bytes_depend_on_the_data_alone_and_the_users_matplotlib_is_left_alone(small, written, tmp_path):
    with matplotlib.rc_context({"lines.linewidth": 9.0, "svg.hashsalt": None}):
        before, backend = dict(matplotlib.rcParams), matplotlib.get_backend()
        again = write_plots(small, tmp_path)
        assert dict(matplotlib.rcParams) == before
        assert matplotlib.get_backend() == backend
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_a_rule_without_a_curve_is_drawn_from_its_grid_and_the_axis_names_the_metric(small):
    axes = PLOTS["quality-against-depth"](small, "huginn-tiny", "docs").axes
    labelled = {line.get_label(): line for panel in axes for line in panel.lines}
    assert len(labelled["entropy-and-kl"].get_xdata()) == 9
    assert len(labelled["kl"].get_xdata()) > 50
    assert {panel.get_ylabel() for panel in axes if panel.axison} == {"bits/byte ↓"}


def test_a_run_in_which_no_rule_reached_equal_quality_can_be_drawn(small, tmp_path):
    only = small.iso.assign(status="unreached", threshold=float("nan"))
    points = small.points[small.points["policy"] == "fixed"]
    empty = replace(small, iso=only, points=points, curves=small.curves.iloc[:0], convergence=small.convergence.iloc[:0])
    drawn = {path.stem.removesuffix("-huginn-tiny-docs") for path in write_plots(empty, tmp_path)}
    assert drawn == set(PLOTS) - {"quality-against-latency", "convergence"}  # nothing was timed or traced


def test_a_model_that_is_not_finite_is_not_drawn(small, tmp_path):
    lost = replace(small, points=small.points.assign(quality=float("nan")))
    assert write_plots(lost, tmp_path) == []
    with pytest.raises(UserError, match="has nothing to draw"):
        figures_pdf(lost)


def test_a_policy_looks_the_same_in_every_plot(small):
    def colour(name):
        axes = PLOTS[name](small, "huginn-tiny", "docs").axes
        return {line.get_color() for panel in axes for line in panel.lines if line.get_label() == "margin"}

    assert len(colour("quality-against-depth")) == 1
    assert colour("quality-against-depth") == colour("against-threshold") == colour("convergence")


def test_several_seeds_share_one_entry_in_the_legend(small):
    curves = pd.concat([small.curves, small.curves.assign(seed=1)])
    figure = PLOTS["against-threshold"](replace(small, curves=curves), "huginn-tiny", "docs")
    labels = [text.get_text() for axes in figure.axes if axes.get_legend() for text in axes.get_legend().get_texts()]
    assert sorted(labels) == sorted(set(labels))


def test_no_two_policies_of_a_panel_look_alike():
    names = ["kl", "kl-two-hits", *(f"kl-{i}" for i in range(9)), "latent-diff", "latent-diff-old", "mine", "entropy-diff"]
    found = looks(names)
    assert sorted(found) == sorted(names)
    assert len(set(found.values())) == len(names)
    assert found["kl-two-hits"].group == found["entropy-diff"].group or "(2)" in found["entropy-diff"].group
    assert found["latent-diff-old"].group == found["latent-diff"].group
    assert found["mine"].group == "other rules"


def test_write_all_writes_every_table_in_every_format_and_one_document(small, tmp_path):
    paths = {path.relative_to(tmp_path).as_posix() for path in write_all(small, tmp_path)}
    assert {f"tables/summary.{format}" for format in ("md", "csv", "tex", "json")} <= paths
    assert {f"tables/front-huginn-tiny-docs.{format}" for format in ("md", "csv", "tex", "json")} <= paths
    assert "plots/convergence-huginn-tiny-docs.svg" in paths
    document = (tmp_path / "tables" / "report.md").read_text(encoding="utf-8")
    assert document.startswith("### huginn-tiny: the best halting policy")
    assert document.count("\n### ") == 5


def test_reading_a_report_loads_neither_torch_nor_anything_heavy():
    heavy = "{'torch', 'pandas', 'matplotlib', 'scipy'}"
    code = f"import sys, halting_bench.reporting.write; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
