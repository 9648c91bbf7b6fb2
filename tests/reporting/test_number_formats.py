import math

import pytest

from halting_bench.reporting.table import Interval, Kind
from halting_bench.reporting.text import format_cell, metric_label, slug


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.87349, Kind.QUALITY, "0.873"),
        (Interval(2.0312, 1.9871, 2.0749), Kind.QUALITY, "2.031 [1.987, 2.075]"),
        (Interval(0.0, -0.0001, 0.01), Kind.DELTA, "0.000 [0.000, +0.010]"),
        (-0.0123, Kind.DELTA, "-0.012"),
        (4.0, Kind.DEPTH, "4.00"),
        (0.4213, Kind.PERCENT, "42.1"),
        (0.0005, Kind.THRESHOLD, "0.0005"),
        (1e-5, Kind.THRESHOLD, "1e-5"),
        (2.5e12, Kind.THRESHOLD, "2.5e12"),
        (8.0, Kind.THRESHOLD, "8"),
        (1234567.0, Kind.COUNT, "1,234,567"),
        ("kl", Kind.TEXT, "kl"),
    ],
)
def test_a_value_is_written_with_the_digits_of_its_kind(value, kind, text):
    assert format_cell(value, kind) == text


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("value", [None, math.nan, Interval(math.nan, math.nan, math.nan)])
def test_what_is_missing_is_a_dash_and_never_a_number(value, kind):
    assert format_cell(value, kind) == "–"


def test_an_infinite_loss_is_named():
    assert format_cell(math.inf, Kind.QUALITY) == "inf"


def test_an_estimate_without_an_interval_is_shown_alone():
    assert format_cell(Interval(0.5, math.nan, math.nan), Kind.QUALITY) == "0.500"


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0.0"), (1e-6, "<0.1"), (1 - 1e-6, ">99.9"), (1.0, "100.0"), (-1e-6, ">-0.1")]
)
def test_a_share_that_is_neither_nothing_nor_all_does_not_read_so(share, text):
    assert format_cell(share, Kind.PERCENT) == text


def test_a_metric_says_in_which_direction_it_gets_better():
    assert metric_label("bits_per_byte", False) == "bits/byte ↓"
    assert metric_label("accuracy", True) == "accuracy ↑"


def test_names_that_differ_in_unsafe_characters_give_different_file_names():
    assert slug("huginn-tiny") == "huginn-tiny"
    names = [slug(name) for name in ("text:a/b", "text:a-b", "text:a:b", "../b", "a b")]
    assert len(set(names)) == len(names)
    assert not any(character in "".join(names) for character in "/: ")
