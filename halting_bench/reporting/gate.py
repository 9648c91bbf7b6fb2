"""What a gate found: a table, and one line for whoever only reads the end of a log."""

from collections import Counter

from halting_bench.analysis.gate import Judgement, Verdict
from halting_bench.reporting.table import Column, Interval, Kind, Row, Table
from halting_bench.reporting.text import format_cell

_ORDER = (Verdict.INCOMPLETE, Verdict.FAIL, Verdict.INCOMPARABLE, Verdict.INCONCLUSIVE, Verdict.PASS)

_COLUMNS = (
    Column("number", "#", Kind.COUNT),
    Column("verdict", "verdict"),
    Column("model", "model"),
    Column("benchmark", "benchmark"),
    Column("policy", "policy"),
    Column("rule", "rule"),
    Column("threshold", "threshold", Kind.THRESHOLD),
    Column("base", "baseline", Kind.THRESHOLD),
    Column("head", "head", Kind.THRESHOLD),
    Column("change", "change", Kind.THRESHOLD, interval=True),
    Column("margin", "margin", Kind.THRESHOLD),
    Column("sign_test", "sign test p", Kind.THRESHOLD),
    Column("reason", "note"),
)


def ordered(judgements: list[Judgement]) -> list[Judgement]:
    """The gravest first."""
    return sorted(judgements, key=lambda each: (each.softened, _ORDER.index(each.verdict)))


def gate_table(judgements: list[Judgement]) -> Table:
    """One row a judgement, the gravest first."""
    rows = []
    for number, each in enumerate(ordered(judgements), 1):
        difference = each.difference
        cells = (
            number,
            f"{each.verdict.value}{' (warning)' if each.softened else ''}",
            each.model,
            each.benchmark,
            each.policy,
            each.rule.name + (f" ({each.shape})" if each.shape else ""),
            difference.point.threshold if difference.point else None,
            difference.base,
            difference.head,
            Interval(difference.value, difference.lo, difference.hi),
            each.margin,
            difference.sign_test,
            each.reason,
        )
        rows.append(Row(cells, control=each.verdict is Verdict.PASS))
    footnotes = (
        "Change: head minus baseline, paired by test document, 95 % interval; of latency the median ratio of runs. "
        "FAIL: the interval lies wholly beyond the margin; PASS: wholly inside it; else INCONCLUSIVE.",
        "Sign test: as many documents better as worse (McNemar's exact test where a document is one answer).",
    )
    return Table("gate", summary(judgements), _COLUMNS, tuple(rows), footnotes, keys=2)


def summary(judgements: list[Judgement]) -> str:
    """`Gate: 2 FAIL, 30 PASS`."""
    counts = Counter(each.verdict for each in judgements)
    return "Gate: " + ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in _ORDER if counts[verdict])


def sentence(judgement: Judgement) -> str:
    """A judgement in one line."""
    difference = judgement.difference
    if difference.value != difference.value:
        return judgement.reason
    base, head = (format_cell(value, Kind.THRESHOLD) for value in (difference.base, difference.head))
    return f"{base} -> {head}; {judgement.reason}" if judgement.reason else f"{base} -> {head}"
