"""The gate: a head run against a baseline, rule by rule, judged on intervals so that noise alone never fails it.

FAIL: the interval of the difference lies wholly beyond the margin; PASS: wholly inside; else INCONCLUSIVE.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from halting_bench.analysis import comparison
from halting_bench.analysis.comparison import Difference
from halting_bench.analysis.pairing import Incomparable, Incomplete, Pair, Point, pair, pairs
from halting_bench.analysis.rules import GateRule, GateRules, Quantity
from halting_bench.errors import UserError
from halting_bench.store import Run


class Verdict(Enum):
    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    INCOMPARABLE = "INCOMPARABLE"
    INCOMPLETE = "INCOMPLETE"


EXIT_CODES = {Verdict.INCOMPLETE: 5, Verdict.FAIL: 1, Verdict.INCOMPARABLE: 4, Verdict.INCONCLUSIVE: 3, Verdict.PASS: 0}
"""In order of precedence. A usage error (2) comes before them all: it raises."""


@dataclass(frozen=True)
class Judgement:
    """One rule on one (model, benchmark, policy)."""

    rule: GateRule
    model: str
    benchmark: str
    policy: str
    verdict: Verdict
    difference: Difference
    margin: float = math.nan  # in the unit of the difference
    reason: str = ""
    shape: str = ""  # of a latency rule
    softened: bool = False  # the rule says that this only warns

    @property
    def title(self) -> str:
        return f"{self.model} / {self.benchmark} / {self.policy}: {self.rule.name}{f' ({self.shape})' if self.shape else ''}"

    @property
    def exit_code(self) -> int:
        return 0 if self.softened else EXIT_CODES[self.verdict]


_NOTHING = Difference(math.nan, math.nan, math.nan, math.nan, math.nan)


def exit_code(judgements: list[Judgement]) -> int:
    """The code of the gravest judgement: incomplete, regression, incomparable, inconclusive, or 0."""
    codes = {judgement.exit_code for judgement in judgements}
    return next((code for code in EXIT_CODES.values() if code in codes), 0)


def gate(head: Run, base: Run, rules: GateRules) -> list[Judgement]:
    """Every rule on everything of the baseline that it names.

    Raises:
        UserError: a rule that names nothing in the baseline. Nothing judged must never read as a pass.
    """
    judged: list[Judgement] = []
    matched = {(model, benchmark): head_model for model, head_model, benchmark in pairs(base, head)}
    known = base.points[["model", "benchmark"]].drop_duplicates().itertuples(index=False, name=None)
    aligned: dict[tuple[str, str, str], Pair | Incomparable | Incomplete] = {}
    measured = [(str(model), str(benchmark)) for model, benchmark in known]
    for rule in rules.rules:
        found = []
        for model, benchmark in measured:
            if not rule.matches(model, benchmark):
                continue
            own = base.points[(base.points["model"] == model) & (base.points["benchmark"] == benchmark)]
            policies = rule.policies(
                [name for name in own["policy"].drop_duplicates() if not name.startswith(("random@", "oracle-"))]
            )
            key = (model, benchmark, rule.evidence)
            if policies and key not in aligned:
                aligned[key] = _align(base, head, matched, *key)
            for policy in policies:
                found += list(_judge(base, head, rule, model, matched.get((model, benchmark)), benchmark, policy, aligned[key]))
        if not found:
            raise UserError(
                f"the rule '{rule.name}' for model '{rule.model}', benchmark '{rule.benchmark}', policy '{rule.policy}' "
                f"matches nothing in the baseline {base.path}: it has {', '.join(f'{m} on {b}' for m, b in measured)}"
            )
        judged += found
    return judged


def _align(
    base: Run, head: Run, matched: dict[tuple[str, str], str], model: str, benchmark: str, evidence: str
) -> Pair | Incomparable | Incomplete:
    if (model, benchmark) not in matched:
        return Incomplete(f"{head.path} has no {model} on {benchmark}")
    try:
        return pair(base, head, model, matched[model, benchmark], benchmark, evidence)
    except (Incomparable, Incomplete) as error:
        return error


def _judge(
    base: Run,
    head: Run,
    rule: GateRule,
    model: str,
    head_model: str | None,
    benchmark: str,
    policy: str,
    aligned: Pair | Incomparable | Incomplete,
) -> Iterator[Judgement]:
    blank = Judgement(rule, model, benchmark, policy, Verdict.INCOMPLETE, _NOTHING)
    try:
        if isinstance(aligned, Exception):
            raise aligned
        if not aligned.same_model and not rule.other_model:
            raise Incomparable("the model's weights or config changed: set other_model: true where that is the purpose")
        if rule.quantity is Quantity.LATENCY:
            point = _point(rule, aligned, policy)
            for shape, difference in comparison.latency(base, head, model, str(head_model), benchmark, point):
                described = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shape.items())
                yield _decided(replace(blank, shape=described), difference, rule.margin.value, aligned)
        else:
            difference = _measure(rule, aligned, policy)
            yield _decided(blank, difference, rule.margin.within(difference.base), aligned)
    except Incomparable as error:
        yield replace(blank, verdict=Verdict.INCOMPARABLE, reason=str(error), softened=rule.incomparable == "warn")
    except Incomplete as error:
        yield replace(blank, reason=str(error))


def _point(rule: GateRule, aligned: Pair, policy: str) -> Point:
    if rule.threshold is not None:
        return Point(policy, rule.threshold)
    if policy not in aligned.base.iso:
        raise Incomparable(f"{policy} reaches equal quality nowhere in the baseline: give the rule a threshold")
    return Point(policy, aligned.base.iso[policy])


_AT_POINT: dict[Quantity, Callable[[Pair, Point], Difference]] = {
    Quantity.QUALITY: comparison.quality,
    Quantity.MEAN_DEPTH: comparison.mean_depth,
    Quantity.FLOPS: comparison.flops,
}
_OF_POLICY: dict[Quantity, Callable[[Pair, str], Difference]] = {
    Quantity.DEPTH_AT_EQUAL_QUALITY: comparison.depth_at_equal_quality,
    Quantity.HYPERVOLUME: comparison.hypervolume,
    Quantity.GAP_SHARE: comparison.gap_share,
}


def _measure(rule: GateRule, aligned: Pair, policy: str) -> Difference:
    if rule.quantity in _AT_POINT:
        return _AT_POINT[rule.quantity](aligned, _point(rule, aligned, policy))
    if rule.quantity is Quantity.QUALITY_AT_EQUAL_DEPTH:
        return comparison.quality_at_equal_depth(aligned, policy, rule.depth)
    return _OF_POLICY[rule.quantity](aligned, policy)


def _decided(blank: Judgement, difference: Difference, margin: float, aligned: Pair) -> Judgement:
    rule = blank.rule
    if math.isnan(difference.base):
        raise Incomparable("the baseline's own figure is not a number")
    if math.isnan(difference.head):
        return replace(
            blank, verdict=Verdict.FAIL, difference=difference, margin=margin, reason="the head's figure is not a number"
        )
    verdict, reason = judge(difference, margin, rule.quantity.worse(aligned.higher_is_better))
    softened = verdict is Verdict.INCONCLUSIVE and rule.inconclusive == "warn"
    return replace(blank, verdict=verdict, difference=difference, margin=margin, reason=reason, softened=softened)


def judge(difference: Difference, margin: float, worse: str) -> tuple[Verdict, str]:
    """The verdict on an interval, and in words why it is not PASS.

    Args:
        difference: head - base.
        margin: how much worse is still fine.
        worse: `up`, `down`, or `both` where a change either way counts.
    """
    lo, hi = difference.lo, difference.hi
    if math.isnan(lo) or math.isnan(hi):
        return Verdict.INCONCLUSIVE, "there is no interval: too few documents or samples"
    if worse == "down":
        lo, hi = -hi, -lo
    change = f"the change [{difference.lo:.4g}, {difference.hi:.4g}]"
    if lo > margin or (worse == "both" and hi < -margin):
        return Verdict.FAIL, f"{change} lies wholly beyond the margin {margin:.4g}"
    if hi <= margin and (worse != "both" or lo >= -margin):
        return Verdict.PASS, ""
    return Verdict.INCONCLUSIVE, f"{change} straddles the margin {margin:.4g}: more documents would tell"
