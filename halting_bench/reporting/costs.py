"""What a policy costs, three ways: core steps, counted FLOPs and measured seconds; and where the seconds go."""

import json
from itertools import combinations
from typing import TYPE_CHECKING

from halting_bench.analysis.pareto import front_mask
from halting_bench.reporting.frames import POINT, chosen_points, is_control, of_pair, select, usual_setting
from halting_bench.reporting.table import Column, Kind, Table, table_of
from halting_bench.reporting.text import metric_label, slug
from halting_bench.store import Run

if TYPE_CHECKING:
    import pandas as pd

_COSTS = {"mean_depth": "mean depth", "mflops": "FLOPs", "latency_ms_per_token": "latency"}
_SWAPS = 3  # changes of order that are told


def costs(run: Run, model: str, benchmark: str) -> Table:
    """Each policy at its least depth of equal quality, ranked by every cost; latency where it was measured."""
    frame = chosen_points(run, model, benchmark)
    frame = frame[(frame["status"] == "ok") & ~frame["policy"].str.startswith("oracle-")].reset_index(drop=True)
    points = of_pair(run.points, model, benchmark)
    frame["mflops"] = frame["flops_per_token"] / 1e6
    known = [cost for cost in _COSTS if cost in frame and frame[cost].notna().any()]
    for cost in known:
        frame[f"{cost}_rank"] = frame[cost].rank(method="min")
    kinds = {"mean_depth": Kind.DEPTH, "mflops": Kind.DEPTH, "latency_ms_per_token": Kind.MILLISECONDS}
    units = {"mean_depth": "", "mflops": "M/token", "latency_ms_per_token": "ms/token"}
    columns = [
        Column("policy", "policy"),
        Column("threshold", "threshold", Kind.THRESHOLD),
        Column("quality", metric_label(*points[["metric", "higher_is_better"]].iloc[0]), Kind.QUALITY, interval=True),
    ]
    for cost in known:
        columns += [Column(cost, _COSTS[cost], kinds[cost], units[cost]), Column(f"{cost}_rank", "rank", Kind.COUNT)]
    evidence = select(points, "test")["evidence"].iloc[0]
    timed = of_pair(run.latency, model, benchmark)
    setting = usual_setting(timed)
    footnotes = [
        f"Points of equal quality: thresholds chosen on calibration documents, figures of test documents; {evidence}. "
        "Rank 1 costs least.",
        *([f"Latency: {setting.describe()}; of the points that were timed."] if setting and known[-1] != "mflops" else ()),
        *(_orders(frame, "mean_depth", cost) for cost in known[1:]),
        *_fronts(points, timed if setting is None else setting.rows(timed)),
    ]
    title = f"{model} on {benchmark}: what equal quality costs"
    return table_of(f"costs-{slug(model)}-{slug(benchmark)}", title, columns, frame, footnotes, keys=2)


def _orders(frame: "pd.DataFrame", first: str, second: str) -> str:
    """Where two costs rank policies differently, the largest changes first."""
    both = frame.dropna(subset=[first, second]).sort_values(first, kind="stable")
    swaps = []
    for a, b in combinations(both.to_dict("records"), 2):
        if a[first] < b[first] and a[second] > b[second]:
            swaps.append((a[second] / b[second] * b[first] / a[first], a["policy"], b["policy"]))
    if not swaps:
        return f"{_COSTS[second]} ranks these policies as {_COSTS[first]} does.".capitalize()
    told = "; ".join(f"{a} before {b}" for _, a, b in sorted(swaps, reverse=True)[:_SWAPS])
    return f"Where orders differ: by {_COSTS[first]} {told}; by {_COSTS[second]} after ({len(swaps)} pairs of policies)."


def _fronts(points: "pd.DataFrame", timed: "pd.DataFrame") -> list[str]:
    """The policies on the front of quality against each cost, on calibration documents."""
    rows = select(points, "calibration")
    rows = rows[~rows["policy"].str.startswith(("oracle-", "random@"))]
    found = {"mean depth": rows["mean_depth"], "FLOPs": rows["flops_per_token"]}
    if "latency_ms_per_token" in timed:
        seconds = rows[POINT].merge(timed[[*POINT, "latency_ms_per_token"]], on=POINT, how="left")["latency_ms_per_token"]
        found["latency"] = seconds.set_axis(rows.index)
    told = []
    for name, cost in found.items():
        known = rows[cost.notna()]
        if known.empty:
            continue
        higher = bool(known["higher_is_better"].iloc[0])
        mask = front_mask(cost[known.index].to_numpy(), known["quality"].to_numpy(), higher)
        policies = known["policy"][mask].value_counts(sort=True)
        told.append(f"{name}: " + ", ".join(f"{policy} ({count})" for policy, count in policies.items()))
    return ["Points on the front of quality against " + "; ".join(told) + "."] if told else []


def stages(run: Run, model: str, benchmark: str) -> Table | None:
    """Where the time of each timed policy goes; None where nothing was timed."""
    import pandas as pd

    frame = of_pair(run.latency, model, benchmark)
    frame = frame[frame["stages"].notna()] if "stages" in frame else frame.iloc[:0]
    if frame.empty:
        return None
    seconds = pd.DataFrame([json.loads(told) for told in frame["stages"]], index=frame.index)
    shares = seconds.div(seconds.sum(axis=1), axis=0)
    frame = frame.join(shares).assign(control=frame["policy"].map(is_control), group=frame["batch_rows"])
    frame = frame.sort_values(["batch_rows", "mode", "phase", "device", "latency_ms_per_token"], kind="stable")
    columns = (
        Column("policy", "policy"),
        Column("threshold", "threshold", Kind.THRESHOLD),
        Column("batch_rows", "rows", Kind.COUNT),
        Column("phase", "phase"),
        *(Column(stage, stage, Kind.PERCENT, "%") for stage in seconds.columns),
        *(Column(name, name) for name in ("mode", "device") if frame[name].nunique() > 1),
    )
    footnotes = (
        "One run more of each timed point, with a clock around every stage. Readout: the layers after the loop and the head, "
        "for rows that stop or whose policy looks at logits. Bookkeeping: all that is none of the others. Prompts count too.",
    )
    return table_of(
        f"stages-{slug(model)}-{slug(benchmark)}",
        f"{model} on {benchmark}: where the time goes",
        columns,
        frame,
        footnotes,
        keys=4,
    )
