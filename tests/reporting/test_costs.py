"""What equal quality costs: steps, FLOPs, seconds; where their orders differ; where time goes."""

import json

import pytest

from halting_bench.reporting.costs import costs, stages
from halting_bench.reporting.latency_plot import quality_against_latency

MODEL = "huginn-tiny"


def column(table, key):
    index = [c.key for c in table.columns].index(key)
    return {row.cells[0]: row.cells[index] for row in table.rows}


def test_every_policy_of_equal_quality_is_ranked_by_each_cost(executed_run):
    table = costs(executed_run, MODEL, "shell")
    iso = executed_run.iso[(executed_run.iso["benchmark"] == "shell") & (executed_run.iso["status"] == "ok")]
    kept = iso[~iso["policy"].str.startswith("oracle-")].set_index("policy")
    assert column(table, "mflops") == pytest.approx((kept["flops_per_token"] / 1e6).to_dict())
    for cost in ("mean_depth", "mflops"):
        values, ranks = column(table, cost), column(table, f"{cost}_rank")
        assert min(ranks.values()) == 1
        for policy, value in values.items():
            assert ranks[policy] == 1 + sum(other < value for other in values.values())
    assert "latency_ms_per_token_rank" in [c.key for c in table.columns]


def test_seconds_have_no_column_where_nothing_was_timed(run):
    assert "latency_ms_per_token" not in [c.key for c in costs(run, MODEL, "shell").columns]
    assert stages(run, MODEL, "shell") is None
    assert quality_against_latency(run, MODEL, "shell") is None


def test_a_change_of_order_is_told_with_its_policies(run):
    table = costs(run, MODEL, "shell")
    depth, flops = column(table, "mean_depth"), column(table, "mflops")
    swapped = [(a, b) for a in depth for b in depth if depth[a] < depth[b] and flops[a] > flops[b]]
    assert swapped  # rules on logits pay for what they read
    (told,) = [note for note in table.footnotes if note.startswith("Where orders differ")]
    assert f"({len(swapped)} pairs of policies)" in told
    named = told.removeprefix("Where orders differ: by mean depth ").partition("; by FLOPs after")[0].split("; ")
    assert {tuple(pair.split(" before ")) for pair in named} <= set(swapped)


def test_fronts_by_depth_and_by_flops_are_told(run):
    (told,) = [note for note in costs(run, MODEL, "shell").footnotes if note.startswith("Points on the front")]
    assert "mean depth: " in told
    assert "; FLOPs: " in told
    by_flops = told.partition("; FLOPs: ")[2]
    assert "kl" not in by_flops.replace("entropy-and-kl", "")  # cheap in steps, dear in FLOPs


def test_shares_of_the_time_add_up(executed_run):
    table = stages(executed_run, MODEL, "docs")
    shares = [column(table, stage) for stage in json.loads(executed_run.latency["stages"].iloc[0])]
    assert len(table.rows) == len(executed_run.latency[executed_run.latency["benchmark"] == "docs"])
    assert sum(share["kl"] for share in shares) == pytest.approx(1.0)


def test_timed_points_are_drawn_with_their_evidence(executed_run):
    figure = quality_against_latency(executed_run, MODEL, "shell")
    panels = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title() for axes in panels] == [f"decode, {rows}, eager, cpu, 2 threads" for rows in ("1 row", "8 rows")]
    assert {axes.get_ylabel() for axes in panels} == {"accuracy ↑, replayed"}
    timed = executed_run.latency[(executed_run.latency["benchmark"] == "shell") & (executed_run.latency["batch_rows"] == 1)]
    rules = timed["policy"][~timed["policy"].str.match("fixed|oracle")].nunique()
    assert len(panels[0].containers) == rules
