"""Tables of two runs or more, side by side: each against the first, paired by test document."""

import math
from collections.abc import Callable

from halting_bench.analysis import comparison
from halting_bench.analysis.changes import changes
from halting_bench.analysis.comparison import Difference
from halting_bench.analysis.pairing import Incomparable, Incomplete, Pair, Point, pair, pairs
from halting_bench.errors import UserError
from halting_bench.reporting.frames import is_control, of_pair
from halting_bench.reporting.table import Cell, Column, Interval, Kind, Row, Table
from halting_bench.reporting.text import metric_label, slug
from halting_bench.store import Run

_NONE = Difference(math.nan, math.nan, math.nan, math.nan, math.nan)


def comparison_tables(runs: list[Run]) -> list[Table]:
    """For each run after the first: what changed, then one table a (model, benchmark) that both measured.

    Raises:
        UserError: fewer than two runs, or runs that measured nothing in common.
    """
    if len(runs) < 2:
        raise UserError("a comparison needs two runs or more: halting-bench compare BASE HEAD...")
    base, tables = runs[0], []
    for number, head in enumerate(runs[1:], 1):
        common = pairs(base, head)
        if not common:
            known = [sorted(set(zip(run.points["model"], run.points["benchmark"], strict=True))) for run in (base, head)]
            raise UserError(f"{base.path} and {head.path} measured nothing in common: {known[0]} against {known[1]}")
        several = f"-{number}" if len(runs) > 2 else ""
        tables.append(_changes(base, head, several))
        tables += [_quantities(base, head, *each, several) for each in common]
    return tables


def _changes(base: Run, head: Run, several: str) -> Table:
    columns = (Column("what", "what"), Column("base", str(base.path)), Column("head", str(head.path)))
    found = changes(base, head)
    machine = comparison.machine_difference(base, head)
    notes = [f"Latency is incomparable: {machine}."] if machine else []
    if not found:
        notes.append("Nothing differs: model, code, machine and settings are the same.")
    return Table(
        f"changes{several}",
        f"What changed from {base.path} to {head.path}",
        columns,
        tuple(Row(each) for each in found),
        tuple(notes),
    )


def _quantities(base: Run, head: Run, model: str, head_model: str, benchmark: str, several: str) -> Table:
    name = f"compare-{slug(model)}-{slug(benchmark)}{several}"
    title = f"{model} on {benchmark}: {head.path} against {base.path}"
    if head_model != model:
        title = f"{head_model} against {model} on {benchmark}: {head.path} against {base.path}"
    try:
        replayed = (of_pair(base.points, model, benchmark)["evidence"] == "replayed").any()
        aligned = pair(base, head, model, head_model, benchmark, "replayed" if replayed else "executed")
    except (Incomparable, Incomplete) as error:
        return Table(name, title, (Column("note", "note"),), (Row((f"Not compared: {error}.",)),))
    metric = metric_label(aligned.metric, aligned.higher_is_better)
    columns = (
        Column("policy", "policy"),
        Column("threshold", "threshold", Kind.THRESHOLD),
        Column("base_depth", "depth, base", Kind.DEPTH),
        Column("head_depth", "depth, head", Kind.DEPTH),
        Column("depth_change", "depth at equal quality", Kind.DELTA, interval=True),
        Column("quality_change", f"{metric} at equal depth", Kind.DELTA, interval=True),
        Column("point_change", f"{metric} at the threshold", Kind.DELTA, interval=True),
        Column("sign_test", "sign test p", Kind.THRESHOLD),
        Column("hypervolume_change", "hypervolume", Kind.DELTA, interval=True),
        Column("latency_change", "latency", Kind.PERCENT, "%", interval=True),
        Column("note", "note"),
    )
    known = aligned.base.points["policy"].unique()
    policies = [policy for policy in known if not is_control(policy) or policy == "fixed"]
    rows = [_row(base, head, aligned, head_model, policy) for policy in policies]
    footnotes = (
        "Changes are head minus base on the test documents that both scored, with 95 % intervals paired by document; of "
        "latency the median ratio of runs, decode before prefill. Depth at equal quality: each run at its own least depth of "
        "full-depth quality. Quality at equal depth: at the base's.",
        f"{aligned.documents} documents, {int(aligned.base.tokens[0].sum()):,} tokens."
        + ("" if aligned.same_model else " The model's weights or config differ."),
    )
    return Table(name, title, columns, tuple(sorted(rows, key=_by_depth)), footnotes, keys=2)


def _by_depth(row: Row) -> float:
    depth = row.cells[2]
    return depth if isinstance(depth, float) and depth == depth else math.inf


def _row(base: Run, head: Run, aligned: Pair, head_model: str, policy: str) -> Row:
    notes: list[str] = []

    def measured(figure: Callable[[], Difference]) -> Difference:
        try:
            return figure()
        except (Incomparable, Incomplete) as error:
            notes.append(str(error))
            return _NONE

    depth = measured(lambda: comparison.depth_at_equal_quality(aligned, policy))
    if math.isinf(depth.head):
        notes.append("the head reaches equal quality nowhere")
        depth = Difference(depth.base, math.nan, math.nan, math.nan, math.nan, depth.point)
    if depth.point is None:
        cells: list[Cell] = [policy, None, None, None, *([Interval(math.nan, math.nan, math.nan)] * 3), None]
        cells += [
            Interval(math.nan, math.nan, math.nan),
            Interval(math.nan, math.nan, math.nan),
            "; ".join(dict.fromkeys(notes)),
        ]
        return Row(tuple(cells), control=is_control(policy))
    point = depth.point
    at_depth = measured(lambda: comparison.quality_at_equal_depth(aligned, policy)) if policy != "fixed" else _NONE
    at_threshold = measured(lambda: comparison.quality(aligned, point))
    area = measured(lambda: comparison.hypervolume(aligned, policy))
    seconds = _latency(base, head, aligned, head_model, point)
    shown = [_interval(each) for each in (depth, at_depth, at_threshold)]
    cells = [policy, point.threshold, depth.base, depth.head, *shown, at_threshold.sign_test]
    cells += [_interval(area), _interval(seconds), "; ".join(dict.fromkeys(notes))]
    return Row(tuple(cells), control=is_control(policy))


def _latency(base: Run, head: Run, aligned: Pair, head_model: str, point: Point) -> Difference:
    """Of the usual shape; what was not timed, or on another machine, stays blank (the table of changes says why)."""
    try:
        found = comparison.latency(base, head, aligned.model, head_model, aligned.benchmark, point)
    except (Incomparable, Incomplete):
        return _NONE
    return min(found, key=lambda each: (each[0]["batch_rows"], each[0]["phase"], each[0]["mode"]))[1]


def _interval(difference: Difference) -> Interval:
    return Interval(difference.value, difference.lo, difference.hi)
