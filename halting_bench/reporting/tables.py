"""The tables of a run: a summary to read first, then for each (model, benchmark) its points of equal quality, its front,
paired comparisons at equal depth, levels, and latency where it was measured.

Pure functions over the run's frames. Every choice was made on calibration documents; every figure shown is of test documents.
"""

from typing import TYPE_CHECKING

from halting_bench.reporting.acted import acted
from halting_bench.reporting.costs import costs, stages
from halting_bench.reporting.frames import (
    POINT,
    chosen_points,
    executed_mode,
    is_control,
    of_pair,
    over_seeds,
    pairs,
    problems,
    ranked,
    select,
    trained_steps,
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
    models = run.points["model"].drop_duplicates()
    tables = [summary(run, model) for model in models]
    tables += [table for model in models if (table := acted(run, model)) is not None]
    for model, benchmark in pairs(run):
        tables += [iso(run, model, benchmark), equal_depth(run, model, benchmark), front(run, model, benchmark)]
        tables.append(costs(run, model, benchmark))
        if (of_pair(run.points, model, benchmark)["subset"] != "all").any():
            tables.append(levels(run, model, benchmark))
        if len(of_pair(run.latency, model, benchmark)):
            tables.append(latency(run, model, benchmark))
            tables += [table for table in (stages(run, model, benchmark),) if table]
    return tables


def summary(run: Run, model: str) -> Table:
    """One row a benchmark: the policy that needs the least depth for full-depth quality."""
    import pandas as pd

    rows = []
    for _, benchmark in (pair for pair in pairs(run) if pair[0] == model):
        best = ranked(run, model, benchmark)
        chosen = chosen_points(run, model, benchmark)
        row = chosen[chosen["policy"] == best[0]].iloc[0].to_dict() if best else {"policy": "none"}
        row |= {"benchmark": benchmark, "metric": _metric(run, model, benchmark), "verdict": _verdict(row) if best else None}
        rows.append(row | {"full_quality": chosen["full_quality"].max()})
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
        Column("verdict", "vs uniform at equal depth"),
    )
    frame = pd.DataFrame(rows).reindex(columns=[key for column in columns for key in column.keys])
    points = run.points[(run.points["model"] == model) & (run.points["subset"] == "all")]
    distinct = sum(int(select(of_pair(points, model, each), "test")["distinct"].sum()) for each in points["benchmark"].unique())
    rules = {policy for policy in points["policy"] if not is_control(policy)}
    footnotes = (
        "Best policy: least mean depth (core steps a scored token) at the quality of full depth, the depth the model was "
        "trained around; chosen on calibration documents, shown on test documents with 95 % intervals over documents.",
        "Saved vs uniform: against the least uniform depth that keeps that quality. Negative: a fixed depth would have done.",
        _gap_note(run.iso[run.iso["model"] == model]),
        f"{distinct:,} distinct operating points of {len(rules)} policies and their controls on {len(rows)} benchmarks.",
    )
    several = run.points["model"].nunique() > 1
    name = f"summary-{slug(model)}" if several else "summary"
    return table_of(name, f"{model}: the best halting policy on each benchmark", columns, frame, footnotes)


def iso(run: Run, model: str, benchmark: str) -> Table:
    """Each policy at its least depth of equal quality."""
    frame = chosen_points(run, model, benchmark)
    evidence = select(of_pair(run.points, model, benchmark), "test")["evidence"].iloc[0]
    columns = [
        _POLICY,
        _THRESHOLD,
        Column("quality", _metric(run, model, benchmark), Kind.QUALITY, interval=True),
        Column("mean_depth", "mean depth", Kind.DEPTH, best="min"),
        _SAVED_FULL,
        _SAVED_UNIFORM,
        _GAP_SHARE,
        Column("random_quality", "random exits", Kind.QUALITY),
        _NEVER,
        *([_NOTE] if frame["note"].any() else ()),
    ]
    footnotes = [
        f"{_full_depth(frame)} Points: the least mean depth of equal quality on calibration documents, shown on test "
        f"documents with 95 % intervals over documents; {evidence}.",
        f"{_uniform_depth(frame)} Random exits: the quality of exits drawn at random from the policy's own depth histogram.",
        _gap_note(frame),
        "Never fired: tokens for which the rule would not have fired at the last step either.",
        *(f"Unreached: {error}." for error in frame["error"][frame["status"] == "unreached"].unique()),
        *_seeds(run, model, benchmark),
        *problems(of_pair(run.points, model, benchmark)),
    ]
    title = f"{model} on {benchmark}: equal quality, least depth"
    return table_of(f"iso-{_stem(model, benchmark)}", title, columns, frame, footnotes)


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
        *_seeds(run, model, benchmark),
    )
    title = f"{model} on {benchmark}: quality at equal mean depth"
    return table_of(f"equal-depth-{_stem(model, benchmark)}", title, columns, frame, footnotes)


def front(run: Run, model: str, benchmark: str) -> Table:
    """The points that no other point dominates on the calibration documents."""
    points = of_pair(run.points, model, benchmark)
    calibration = select(points, "calibration")
    calibration = calibration[calibration["on_front"]]
    # Thresholds of one policy that assign the same exits are one point; policies that tie all keep their name.
    calibration = calibration.drop_duplicates(["seed", "policy", "mean_depth", "quality"]).sort_values(
        ["mean_depth", "policy", "seed"]
    )
    frame = with_executed(calibration[POINT].merge(select(points, "test"), on=POINT, how="left"), points)
    sign = 1 if points["higher_is_better"].iloc[0] else -1
    frame["advantage"] = sign * (frame["quality"] - frame["quality_full_depth"])
    frame["saving_full"] = 1 - frame["mean_depth"] / of_pair(run.iso, model, benchmark)["full_depth"].max()
    frame["control"] = frame["policy"].map(is_control)
    several = frame["seed"].nunique() > 1
    columns = (
        _POLICY,
        _THRESHOLD,
        *((Column("seed", "seed", Kind.COUNT),) if several else ()),
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
    title = f"{model} on {benchmark}: Pareto front"
    return table_of(f"front-{_stem(model, benchmark)}", title, columns, frame, footnotes, keys=3 if several else 2)


def levels(run: Run, model: str, benchmark: str) -> Table:
    """The best policies by level and token class, between full depth and the oracle. Needs points of subsets."""
    import pandas as pd

    points = of_pair(run.points, model, benchmark)
    found = of_pair(run.iso, model, benchmark)
    names = ["fixed", *ranked(run, model, benchmark)[:_TOP], "oracle-loss"]
    keys = found.loc[(found["status"] == "ok") & found["policy"].isin(names), POINT]
    keys.loc[keys["policy"] == "fixed", "threshold"] = trained_steps(run, model, benchmark)
    parts = []
    for subset in points["subset"][points["subset"] != "all"].drop_duplicates():
        part = over_seeds(keys.merge(select(points, "test", subset=subset), on=POINT), ["policy"]).set_index("policy")
        present = [name for name in names if name in part.index]
        parts.append(part.loc[present].reset_index().assign(subset=subset, group=subset))
    frame = pd.concat(parts, ignore_index=True)
    columns = (
        Column("subset", "subset"),
        _POLICY,
        Column("quality", _metric(run, model, benchmark), Kind.QUALITY, interval=True),
        _DEPTH,
        _NEVER,
        Column("n_tokens", "tokens", Kind.COUNT),
    )
    frame["control"] = frame["policy"].map(is_control)
    footnotes = (
        f"The {_TOP} policies of least depth at equal quality, between full depth (fixed) and the loss oracle; each at one "
        "threshold for all subsets. Test documents, 95 % intervals over documents.",
        *_seeds(run, model, benchmark),
    )
    title = f"{model} on {benchmark}: by level and token class"
    return table_of(f"levels-{_stem(model, benchmark)}", title, columns, frame, footnotes, keys=2)


def latency(run: Run, model: str, benchmark: str) -> Table:
    """Measured seconds of the timed points. Needs a latency frame."""
    frame = of_pair(run.latency, model, benchmark)
    frame = frame.rename(columns={"p10": "latency_ms_per_token_lo", "p90": "latency_ms_per_token_hi"})
    frame = frame.assign(
        note=_timing_note(frame), control=frame["policy"].map(is_control), group=frame["batch_rows"]
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
        "Prefill: a rule on states scores all positions of a text together, as uniform depth does; one that reads logits goes "
        "token by token, and may take longer than it saves.",
    )
    return table_of(f"latency-{_stem(model, benchmark)}", f"{model} on {benchmark}: latency", columns, frame, footnotes, keys=3)


def _timing_note(frame: "pd.DataFrame") -> "pd.Series":
    """What a reader must not miss about a timing: that there is none, or that it is noisy."""
    noisy = frame["noisy"].map({True: "noisy", False: ""}).fillna("")
    return noisy.where(frame["status"] == "ok", frame["status"]) if "status" in frame else noisy


def _verdict(row: dict) -> str | None:
    """The policy against uniform depth, as its paired interval has it."""
    if row["delta_uniform_lo"] > 0:
        return "better"
    if row["delta_uniform_hi"] < 0:
        return "worse"
    return "tied" if row["delta_uniform"] == row["delta_uniform"] else None


def _full_depth(frame: "pd.DataFrame") -> str:
    """What full depth is and gives: the same in every row."""
    return f"Full depth {frame['full_depth'].iloc[0]:g} gives {format_cell(frame['full_quality'].iloc[0], Kind.QUALITY)}."


def _uniform_depth(frame: "pd.DataFrame") -> str:
    depth = frame["uniform_depth"].iloc[0]
    if depth != depth:
        return "No uniform depth keeps the quality of full depth on calibration documents."
    return (
        f"Saved vs uniform: against depth {depth:g}, the least uniform depth that keeps that quality on calibration documents."
    )


def _seeds(run: Run, model: str, benchmark: str) -> list[str]:
    count = of_pair(run.iso, model, benchmark)["seed"].nunique()
    return (
        [f"Means over {count} seeds, thresholds and interval ends too; each seed chose its own threshold."] if count > 1 else []
    )


def _gap_note(frame: "pd.DataFrame") -> str:
    flattered = frame["gap_optimistic"].any()
    note = "Oracle gap closed: share of the distance from uniform depth to the loss oracle at equal mean depth."
    return note + (
        " The oracle is optimistic (it picks the least of noisy losses), so the share is too small." if flattered else ""
    )


def _metric(run: Run, model: str, benchmark: str) -> str:
    points = of_pair(run.points, model, benchmark)
    return metric_label(*points[["metric", "higher_is_better"]].iloc[0])


def _stem(model: str, benchmark: str) -> str:
    return f"{slug(model)}-{slug(benchmark)}"
