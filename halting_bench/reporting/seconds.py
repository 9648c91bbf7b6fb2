"""Points timed against each other as a table: one against itself, or two models."""

from typing import TYPE_CHECKING

from halting_bench.reporting.table import Column, Kind, Table, table_of

if TYPE_CHECKING:
    import pandas as pd


def race_table(frame: "pd.DataFrame", other: str | None) -> Table:
    """The rows of `latency_compare`. other: what the points were timed against; None: against themselves."""
    frame = frame.assign(note=frame["error"].where(frame["error"] != "", frame["noisy"].map({True: "noisy", False: ""})))
    columns = [
        Column("benchmark", "benchmark"),
        Column("policy", "policy"),
        Column("threshold", "threshold", Kind.THRESHOLD),
        Column("phase", "phase"),
        Column("mode", "mode"),
        Column("batch_rows", "batch rows", Kind.COUNT),
        Column("ratio", "other/this" if other else "A/A", Kind.RATIO, interval=True),
        Column("latency_ms_per_token", "latency", Kind.MILLISECONDS, "ms/token"),
        Column("noise", "noise", Kind.PERCENT, "%"),
    ]
    if other:
        columns += [
            Column("mean_depth", "mean depth", Kind.DEPTH),
            Column("other_threshold", "other's threshold", Kind.THRESHOLD),
            Column("other_mean_depth", "other's mean depth", Kind.DEPTH),
            Column("other_latency_ms_per_token", "other's latency", Kind.MILLISECONDS, "ms/token"),
            Column("other_noise", "other's noise", Kind.PERCENT, "%"),
        ]
    if frame["note"].any():
        columns.append(Column("note", "note"))
    said = (
        f"Ratio: seconds of {other} over those of this run, timed in turns, with its 95 % interval. Above 1: slower."
        if other
        else "The same work timed twice, in turns: an interval that leaves out 1, or a wide one, is the timing's own noise."
    )
    footnotes = (said, "Noise: half the width of the median's 95 % interval, relative to the median.")
    title = f"this run against {other}" if other else "timing noise: a point against itself"
    return table_of("against" if other else "self-test", title, columns, frame, footnotes, keys=3)
