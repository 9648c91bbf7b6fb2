"""The points that were acted out: quality, depth, FLOPs and seconds side by side, with the gap to what the replay promised."""

from typing import TYPE_CHECKING

from halting_bench.reporting.frames import (
    POINT,
    executed_mode,
    of_pair,
    pairs,
    select,
    trained_steps,
    usual_setting,
    with_executed,
)
from halting_bench.reporting.table import Column, Kind, Table, table_of
from halting_bench.reporting.text import slug
from halting_bench.store import Run

if TYPE_CHECKING:
    import pandas as pd


def acted(run: Run, model: str) -> Table | None:
    """One model's executed points of every benchmark, each group headed by uniform depth at the trained mean.

    None when nothing was executed. Milliseconds are there where the points were timed.
    """
    import pandas as pd

    parts = [_of_benchmark(run, model, benchmark) for of_model, benchmark in pairs(run) if of_model == model]
    parts = [part for part in parts if len(part)]
    if not parts:
        return None
    frame = pd.concat(parts, ignore_index=True)
    timed = "latency_ms_per_token" in frame
    columns = (
        Column("benchmark", "benchmark"),
        Column("policy", "policy"),
        Column("threshold", "threshold", Kind.THRESHOLD),
        Column("executed_depth", "mean depth", Kind.DEPTH),
        Column("executed_quality", "quality", Kind.QUALITY, interval=True),
        Column("executed_gap", "minus replayed", Kind.DELTA),
        Column("mflops", "FLOPs", Kind.DEPTH, "M/token"),
        *((Column("latency_ms_per_token", "latency", Kind.MILLISECONDS, "ms/token"),) if timed else ()),
        *((Column("speedup", "speed-up", Kind.RATIO),) if timed else ()),
        *((Column("note", "note"),) if frame["note"].any() else ()),
    )
    setting = usual_setting(run.latency[run.latency["model"] == model]) if timed else None
    footnotes = (
        "Executed: exited tokens stop, and what later tokens see of them is frozen. Test documents, 95 % intervals over "
        "documents. Minus replayed: what the replay of the same point promised is subtracted.",
        "Heading each benchmark: uniform depth at the trained mean, against which speed-up is measured.",
        *([f"Latency: {setting.describe()}. Counted FLOPs are not seconds."] if setting else ()),
    )
    return table_of(f"acted-{slug(model)}", f"{model}: points acted out", columns, frame, footnotes, keys=3)


def _as_executed(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Rows whose own figures are those of acting; nothing was promised before."""
    quality = {name: name.replace("quality", "executed_quality") for name in ("quality", "quality_lo", "quality_hi")}
    return rows.rename(columns=quality).assign(executed_depth=rows["mean_depth"], executed_gap=float("nan"))


def _of_benchmark(run: Run, model: str, benchmark: str) -> "pd.DataFrame":
    import pandas as pd

    points = of_pair(run.points, model, benchmark)
    if not (points["evidence"] == "executed").any():
        return pd.DataFrame()
    mode, test = executed_mode(points), select(points, "test")
    full = test[(test["policy"] == "fixed") & (test["threshold"] == trained_steps(run, model, benchmark))]
    if mode is None:  # all were acted out: those of equal quality
        own = _as_executed(test[test["role"] == "iso"])
    else:
        executed = select(points[points["kv_mode"] == mode], "test", evidence="executed")
        own = with_executed(executed[POINT].merge(test, on=POINT, how="left"), points)
        own["flops_per_token"] = own[POINT].merge(executed, on=POINT)["flops_per_token"].to_numpy()
    frame = pd.concat([_as_executed(full), own.sort_values("executed_depth")], ignore_index=True)
    frame["mflops"] = frame["flops_per_token"] / 1e6
    frame["note"] = ""
    timed = of_pair(run.latency, model, benchmark)
    setting = usual_setting(timed)
    if setting:
        seconds = setting.rows(timed).merge(timed.drop_duplicates(POINT)[[*POINT, "speedup"]], on=POINT)
        frame = frame.merge(seconds, on=POINT, how="left")
        unknown = frame["latency_ms_per_token"].isna()
        frame["note"] = unknown.map({True: "not timed", False: ""}).where(frame["noisy"] != True, "noisy")  # noqa: E712
    return frame.assign(benchmark=benchmark, group=benchmark, control=frame["policy"] == "fixed")
