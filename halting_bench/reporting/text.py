"""Numbers and names as people read them. The only place that decides digits, signs and units."""

import hashlib
import math
import re

from halting_bench.reporting.table import Cell, Interval, Kind

MISSING = "–"
_DIGITS = {Kind.QUALITY: 3, Kind.DELTA: 3, Kind.DEPTH: 2, Kind.MILLISECONDS: 3, Kind.RATIO: 2}


def format_cell(value: Cell, kind: Kind) -> str:
    """Writes one value; an interval as `value [lo, hi]`, a missing value as a dash."""
    if isinstance(value, Interval):
        if math.isnan(value.lo) and math.isnan(value.hi):
            return _number(value.value, kind)
        return f"{_number(value.value, kind)} [{_number(value.lo, kind)}, {_number(value.hi, kind)}]"
    if value is None:
        return MISSING
    return value if isinstance(value, str) else _number(value, kind)


def _number(value: float, kind: Kind) -> str:
    if math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if kind is Kind.COUNT:
        return f"{int(value):,}"
    if kind is Kind.PERCENT:
        return _percent(value)
    if kind is Kind.THRESHOLD or kind is Kind.TEXT:
        return re.sub(r"e([-+])0*", lambda match: "e" + match[1].strip("+"), f"{value:.3g}")
    text = f"{value:{'+' if kind is Kind.DELTA else ''}.{_DIGITS[kind]}f}"
    return text if re.search("[1-9]", text) else text.lstrip("+-")


def _percent(fraction: float) -> str:
    """One decimal; a share that is neither nothing nor all never reads as if it were."""
    text = f"{100 * fraction:.1f}"
    if text in ("0.0", "-0.0") and fraction != 0:
        return "<0.1" if fraction > 0 else ">-0.1"
    if text == "100.0" and fraction < 1:
        return ">99.9"
    return "0.0" if text == "-0.0" else text


def metric_label(metric: str, higher_is_better: bool) -> str:
    """`bits_per_byte` -> `bits/byte ↓`: the metric with the direction in which it gets better."""
    return f"{metric.replace('_per_', '/').replace('_', ' ')} {'↑' if higher_is_better else '↓'}"


def slug(name: str) -> str:
    """A file name for any name: unchanged where it is safe, else with a digest that keeps two names apart."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60]
    return safe if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
