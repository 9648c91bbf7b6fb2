"""The tables of a run: a summary to read first, then for each (model, benchmark) its points of equal quality, its front,
paired comparisons at equal depth, levels, and latency where it was measured.

Pure functions over the run's frames. Every choice was made on calibration documents; every figure shown is of test documents.
"""

from typing import TYPE_CHECKING

from halting_bench.reporting.frames import (
    POINT,
    chosen_points,
    executed_mode,
    is_control,
    of_pair,
    pairs,
    problems,
    ranked,
    select,
    usual_setting,
    with_executed,
)
from halting_bench.reporting.table import Column, Kind, Table, table_of
from halting_bench.reporting.text import format_cell, metric_label, slug
from halting_bench.store import Run

if TYPE_CHECKING:
    import pandas as pd

_POLICY = Column("policy", "policy")
_THRESHOLD = Column("threshold", "threshold", Kind.THRESHOLD)
_QUALITY = Column("quality", "quality", Kind.QUALITY, interval=True)
_DEPTH = Column("mean_depth", "mean depth", Kind.DEPTH)
_SAVED_FULL = Column("saving_full", "saved vs full", Kind.PERCENT, "%", best="max")
_SAVED_UNIFORM = Column("saving_uniform", "saved vs uniform", Kind.PERCENT, "%", best="max")
_GAP_SHARE = Column("gap_share", "oracle gap closed", Kind.PERCENT, "%", best="max")
_NEVER = Column("never_fired_fraction", "never fired", Kind.PERCENT, "%")
_NOTE = Column("note", "note")
_EXECUTED = (
    Column("executed_depth", "executed depth", Kind.DEPTH),
    Column("executed_quality", "executed quality", Kind.QUALITY, interval=True),
    Column("executed_gap", "executed minus replayed", Kind.DELTA),
)
_LATENCY = Column("latency_ms_per_token", "latency, p10 to p90", Kind.MILLISECONDS, "ms/token", interval=True)

_TOP = 3  # policies shown by level: enough to compare, few enough to read


def summary_tables(run: Run) -> list[Table]:
    """Every table of a run, the summary of each model first."""
    tables = [summary(run, model) for model in run.points["model"].drop_duplicates()]
    for model, benchmark in pairs(run):
        tables += [iso(run, model, benchmark), equal_depth(run, model, benchmark), front(run, model, benchmark)]
        if (of_pair(run.points, model, benchmark)["subset"] != "all").any():
            tables.append(levels(run, model, benchmark))
        if len(of_pair(run.latency, model, benchmark)):
            tables.append(latency(run, model, benchmark))
    return tables


def summary(run: Run, model: str) -> Table:
    """One row a benchmark: the policy that needs the least depth for full-depth quality."""
    import pandas as pd

    rows = []
    for _, benchmark in (pair for pair in pairs(run) if pair[0] == model):
        chosen = of_pair(run.iso, model, benchmark)
        best = ranked(run, model, benchmark)
        row = chosen[chosen["policy"] == best[0]].iloc[0].to_dict() if best else {"policy": "none"}
        points = of_pair(run.points, model, benchmark)
        metric, higher = points[["metric", "higher_is_better"]].iloc[0]
        row |= {"benchmark": benchmark, "metric": metric_label(metric, higher)}
        row["full_quality"] = points["quality_full_depth"][(points["split"] == "test") & (points["subset"] == "all")].mean()
        row["verdict"] = _verdict(row) if best else None
        rows.append(row)
    columns = (
        Column("benchmark", "benchmark"),
        Column("policy", "best policy"),
        _QUALITY,
        Column("full_quality", "at full depth", Kind.QUALITY),
        _DEPTH,
        Column("saving_full", "saved vs full", Kind.PERCENT, "%"),
        Column("saving_uniform", "saved vs uniform", Kind.PERCENT, "%"),
        Column("metric", "metric"),
        _THRESHOLD,
        Column("gap_share", "oracle gap closed", Kind.PERCENT, "%"),
        Column("verdict", "than uniform at equal depth"),
    )
    frame = pd.DataFrame(rows).reindex(columns=[key for column in columns for key in column.keys])
    points = run.points[(run.points["model"] == model) & (run.points["subset"] == "all")]
    grid = points[points["distinct"] & (points["split"] == "test") & (points["evidence"] == "replayed")]
    rules = {policy for policy in points["policy"] if not is_control(policy)}
    footnotes = (
        "Best policy: least mean depth (core steps a scored token) at the quality of full depth, the depth the model was "
        "trained around; chosen on calibration documents, shown on test documents with 95 % intervals over documents.",
        "Saved vs uniform: against the least uniform depth of equal quality. Negative: a fixed depth would have done.",
        _gap_note(run.iso[run.iso["model"] == model]),
        f"{len(grid):,} distinct operating points of {len(rules)} policies and their controls on {len(rows)} benchmarks.",
    )
    several = run.points["model"].nunique() > 1
    return table_of(
        f"summary-{slug(model)}" if several else "summary",
        f"{model}: the best halting policy on each benchmark",
        columns,
        frame,
        footnotes,
    )


def iso(run: Run, model: str, benchmark: str) -> Table:
    """Each policy at its least depth of equal quality."""
    frame = chosen_points(run, model, benchmark)
    mode = executed_mode(of_pair(run.points, model, benchmark))
    setting = usual_setting(of_pair(run.latency, model, benchmark))
    columns = [
        _POLICY,
        _THRESHOLD,
        Column("quality", _metric(run, model, benchmark), Kind.QUALITY, interval=True),
        Column("mean_depth", "mean depth", Kind.DEPTH, best="min"),
        _SAVED_FULL,
        _SAVED_UNIFORM,
        Column("uniform_depth", "equal uniform depth", Kind.DEPTH),
        _GAP_SHARE,
        Column("random_quality", "random exits", Kind.QUALITY),
        _NEVER,
        *([_NOTE] if frame["note"].any() else ()),
        *(_EXECUTED if mode else ()),
        *([_LATENCY] if setting else ()),
    ]
    known = frame[frame["status"] == "ok"]
    full = (
        f"{format_cell(known['full_quality'].iloc[0], Kind.QUALITY)} at depth {known['full_depth'].iloc[0]:g}"
        if len(known)
        else "unknown"
    )
    footnotes = [
        f"Full depth: {full}. Points: the least mean depth of equal quality on calibration documents, shown on test documents, "
        "with 95 % intervals over documents; replayed.",
        "Equal uniform depth: the least uniform depth of equal quality; saved vs uniform is against it. Random exits: the "
        "quality of exits drawn at random from the policy's own depth histogram.",
        _gap_note(frame),
        "Never fired: tokens for which the rule would not have fired at the last step either.",
        *([f"Executed with K/V of exited tokens: {mode}."] if mode else ()),
        *([f"Latency: {setting.describe()}."] if setting else ()),
        *problems(of_pair(run.points, model, benchmark)),
    ]
    return table_of(
        f"iso-{_stem(model, benchmark)}", f"{model} on {benchmark}: equal quality, least depth", columns, frame, footnotes
    )


def equal_depth(run: Run, model: str, benchmark: str) -> Table:
    """Quality against the uniform curve and against random exits, both at the policy's own mean depth."""
    frame = chosen_points(run, model, benchmark)
    frame = frame[frame["mean_depth"].notna()]
    columns = (
        _POLICY,
        _DEPTH,
        Column("delta_uniform", "minus uniform", Kind.DELTA, interval=True, best="positive"),
        Column("delta_random", "minus random exits", Kind.DELTA, interval=True, best="positive"),
    )
    footnotes = (
        f"Quality advantage in {_metric(run, model, benchmark)} at equal mean depth, positive is better; paired by test "
        "document, 95 % intervals. Uniform: the uniform-depth curve, linear between whole depths.",
    )
    title = f"{model} on {benchmark}: quality at equal mean depth"
    return table_of(f"equal-depth-{_stem(model, benchmark)}", title, columns, frame, footnotes)


def front(run: Run, model: str, benchmark: str) -> Table:
    """The points that no other point dominates on the calibration documents."""
    points = of_pair(run.points, model, benchmark)
    calibration = points[points["on_front"] & (points["split"] == "calibration") & (points["subset"] == "all")]
    # Thresholds of one policy that assign the same exits are one point; policies that tie all keep their name.
    calibration = calibration.drop_duplicates(["policy", "mean_depth", "quality"]).sort_values(["mean_depth", "policy"])
    keys = calibration[POINT].drop_duplicates()
    frame = with_executed(keys.merge(select(points, "test"), on=POINT, how="left"), points)
    sign = 1 if points["higher_is_better"].iloc[0] else -1
    frame["advantage"] = sign * (frame["quality"] - frame["quality_full_depth"])
    frame["saving_full"] = 1 - frame["mean_depth"] / of_pair(run.iso, model, benchmark)["full_depth"].max()
    frame["control"] = frame["policy"].map(is_control)
    columns = (
        _POLICY,
        _THRESHOLD,
        _DEPTH,
        Column("quality", _metric(run, model, benchmark), Kind.QUALITY, interval=True),
        Column("advantage", "minus full depth", Kind.DELTA),
        Column("saving_full", "saved vs full", Kind.PERCENT, "%"),
        _NEVER,
        *(_EXECUTED if executed_mode(points) else ()),
    )
    footnotes = (
        "Points that no other point dominates on calibration documents, shown on test documents; uniform depth takes part, "
        "oracles and random exits do not. Minus full depth: positive is better.",
    )
    return table_of(
        f"front-{_stem(model, benchmark)}", f"{model} on {benchmark}: Pareto front", columns, frame, footnotes, keys=2
    )


def levels(run: Run, model: str, benchmark: str) -> Table:
    """The best policies by level and token class, between full depth and the oracle. Needs points of subsets."""
    import pandas as pd

    points = of_pair(run.points, model, benchmark)
    chosen = of_pair(run.iso, model, benchmark)
    chosen = chosen[chosen["status"] == "ok"]
    full_depth = chosen["full_depth"].max()
    names = [*ranked(run, model, benchmark)[:_TOP], "oracle-loss"]
    keys = chosen.set_index("policy").reindex(names)["threshold"].rename_axis("policy").reset_index()
    keys = pd.concat([pd.DataFrame({"policy": ["fixed"], "threshold": [full_depth]}), keys], ignore_index=True)
    parts = []
    for subset in points["subset"].drop_duplicates():
        if subset != "all":
            parts.append(keys.merge(select(points, "test", subset=subset), on=POINT).assign(subset=subset, group=subset))
    frame = pd.concat(parts, ignore_index=True)
    columns = (
        Column("subset", "subset"),
        _POLICY,
        Column("quality", _metric(run, model, benchmark), Kind.QUALITY, interval=True),
        _DEPTH,
        Column("saving_full", "saved vs full", Kind.PERCENT, "%"),
        Column("n_tokens", "tokens", Kind.COUNT),
        _NEVER,
    )
    frame["saving_full"] = 1 - frame["mean_depth"] / full_depth
    frame["control"] = frame["policy"].map(is_control)
    footnotes = (
        f"The {_TOP} policies of least depth at equal quality, between full depth (fixed) and the loss oracle; each at one "
        "threshold for all subsets. Test documents, 95 % intervals over documents.",
    )
    title = f"{model} on {benchmark}: by level and token class"
    return table_of(f"levels-{_stem(model, benchmark)}", title, columns, frame, footnotes, keys=2)


def latency(run: Run, model: str, benchmark: str) -> Table:
    """Measured seconds of the timed points. Needs a latency frame."""
    frame = of_pair(run.latency, model, benchmark)
    frame = frame.rename(columns={"p10": "latency_ms_per_token_lo", "p90": "latency_ms_per_token_hi"})
    frame = frame.assign(
        note=frame["noisy"].map({True: "noisy", False: ""}), control=frame["policy"].map(is_control), group=frame["batch_rows"]
    ).sort_values(["batch_rows", "mode", "phase", "device", "latency_ms_per_token"], kind="stable")
    columns = (
        _POLICY,
        _THRESHOLD,
        Column("batch_rows", "batch rows", Kind.COUNT),
        _LATENCY,
        Column("speedup", "speed-up", Kind.RATIO),
        Column("speedup_ideal", "ideal", Kind.RATIO),
        Column("realised_fraction", "realised", Kind.PERCENT, "%"),
        Column("device", "device"),
        Column("mode", "mode"),
        Column("phase", "phase"),
        _NOTE,
    )
    footnotes = (
        "Speed-up: against uniform depth at the trained mean, same device and rows. Ideal: if time followed mean depth. "
        "Realised: the share of the seconds that a uniform depth equal to the mean depth would save. Noisy: the interval of "
        "the median missed its target.",
    )
    return table_of(f"latency-{_stem(model, benchmark)}", f"{model} on {benchmark}: latency", columns, frame, footnotes, keys=3)


def _verdict(row: dict) -> str | None:
    """The policy against uniform depth, as its paired interval has it."""
    if row["delta_uniform_lo"] > 0:
        return "better"
    if row["delta_uniform_hi"] < 0:
        return "worse"
    return "tied" if row["delta_uniform"] == row["delta_uniform"] else None


def _gap_note(frame: "pd.DataFrame") -> str:
    flattered = frame["gap_optimistic"].fillna(False).astype(bool).any() if "gap_optimistic" in frame else False
    note = "Oracle gap closed: share of the distance from uniform depth to the loss oracle at equal mean depth."
    return note + (
        " The oracle is optimistic (it picks the least of noisy losses), so the share is too small." if flattered else ""
    )


def _metric(run: Run, model: str, benchmark: str) -> str:
    points = of_pair(run.points, model, benchmark)
    return metric_label(*points[["metric", "higher_is_better"]].iloc[0])


def _stem(model: str, benchmark: str) -> str:
    return f"{slug(model)}-{slug(benchmark)}"
