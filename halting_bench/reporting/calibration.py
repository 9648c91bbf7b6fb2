"""The table that `calibrate` prints: what each policy is certified for, and what the test documents then say."""

from typing import TYPE_CHECKING

from halting_bench.reporting.table import Column, Kind, Table, table_of
from halting_bench.reporting.text import metric_label, slug

if TYPE_CHECKING:
    import pandas as pd


def calibration_tables(frame: "pd.DataFrame") -> list[Table]:
    """One table a (model, benchmark), the fastest certified policy first."""
    return [
        _table(part, str(model), str(benchmark))
        for (model, benchmark), part in frame.groupby(["model", "benchmark"], sort=False)
    ]


def _table(frame: "pd.DataFrame", model: str, benchmark: str) -> Table:
    first = frame.iloc[0]
    metric = metric_label(first["metric"], bool(first["higher_is_better"]))
    columns = (
        Column("policy", "policy"),
        Column("evidence", "evidence"),
        *((Column("seed", "seed", Kind.COUNT),) if frame["seed"].nunique() > 1 else ()),
        Column("threshold", "threshold", Kind.THRESHOLD),
        Column("mean_depth_calibration", "calibration depth", Kind.DEPTH),
        Column("mean_depth_test", "test depth", Kind.DEPTH, best="min"),
        Column("loss_calibration", "calibration loss", Kind.DELTA, interval=True),
        Column("loss_test", "test loss", Kind.DELTA, interval=True),
        Column("clipped_loss_test", "test loss, clipped", Kind.DELTA),
        Column("p_value", "p", Kind.THRESHOLD),
        Column("n_documents", "documents", Kind.COUNT),
        Column("error", "note"),
    )
    keys = [key for column in columns for key in column.keys]
    pilot = (frame["tested_on"] == "calibration").any()
    frame = frame.reindex(columns=[*keys, "status"])
    frame = frame.assign(status=frame["status"].map({"certified": "ok"}).fillna("none"), control=frame["policy"] == "fixed")
    frame = frame.assign(group=frame["status"] != "ok").sort_values(["group", "mean_depth_test", "policy"], kind="stable")
    placed = (
        "a quarter of the calibration documents places and orders the thresholds, the others test them; executed points are "
        "ordered by all of them, and tested on the test documents."
        if pilot
        else "points chosen and ordered on the calibration documents, tested on the test documents."
    )
    footnotes = (
        f"Certified: with probability {first['own_confidence']:.4g}, the mean loss of a document in {metric}, against full "
        f"depth and clipped to [0, {first['bound']:g}], is at most {first['max_loss']:g}. Learn-then-Test, fixed sequence, "
        f"Hoeffding-Bentkus p-values; {placed}",
        "Losses are means over documents with 95 % intervals, unclipped unless it says so.",
    )
    name = f"calibration-{slug(model)}-{slug(benchmark)}"
    return table_of(name, f"{model} on {benchmark}: fastest certified thresholds", columns, frame, footnotes, keys=2)
