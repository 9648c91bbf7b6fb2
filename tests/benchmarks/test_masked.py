"""Laws of the masked benchmark: what is hidden, what is scored, and who may be asked."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halting_bench.benchmarks.base import NOT_SCORED, Sequence
from halting_bench.benchmarks.classes import class_codes
from halting_bench.benchmarks.masked import GAP, MASK, RUN_BOUNDS, SHORTEST_WINDOW, MaskedBenchmark, hidden_runs
from halting_bench.benchmarks.text import BYTES, Encoding
from halting_bench.benchmarks.text_sources import docs_benchmark, masked_benchmark
from halting_bench.errors import UserError

DOCUMENT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=SHORTEST_WINDOW, max_size=900).map(
    str.encode
)


def benchmark(documents: list[bytes], window: int = SHORTEST_WINDOW) -> MaskedBenchmark:
    return MaskedBenchmark("toy", documents, {"kind": "toy"}, window=window)


def filled(sequence: Sequence) -> bytes:
    """The window with its targets where they were hidden."""
    return bytes(np.where(sequence.targets == NOT_SCORED, sequence.tokens, sequence.targets).tolist())


@given(DOCUMENT, st.integers(SHORTEST_WINDOW, 200))
def test_a_masked_byte_is_scored_once_and_hidden_and_every_other_one_is_seen(text, window):
    sequences = benchmark([text], window).sequences(0)
    assert b"".join(filled(sequence) for sequence in sequences) == text
    for sequence in sequences:
        assert len(sequence.tokens) == len(sequence.targets) <= window
        np.testing.assert_array_equal(sequence.tokens == MASK, sequence.targets != NOT_SCORED)
        assert (sequence.targets != NOT_SCORED).any()


@given(DOCUMENT)
def test_subsets_are_the_class_of_the_byte_and_the_length_of_its_run(text):
    for sequence in benchmark([text]).sequences(0):
        hidden = sequence.tokens == MASK
        for codes in sequence.codes.values():
            assert codes.dtype == np.int16
            np.testing.assert_array_equal(codes >= 0, hidden)
        np.testing.assert_array_equal(sequence.codes["class"][hidden], class_codes(sequence.targets[hidden].astype(np.uint8)))
        edges = np.flatnonzero(np.diff(np.concatenate(([0], hidden, [0]))))
        for start, stop in edges.reshape(-1, 2):
            assert set(sequence.codes["run"][start:stop]) == {np.searchsorted(RUN_BOUNDS, stop - start)}
        seen = np.concatenate(([edges[0]], edges[2::2] - edges[1:-1:2], [len(hidden) - edges[-1]]))
        assert seen.min() >= GAP[0]


def test_each_length_of_run_hides_about_as_many_bytes():
    rng = np.random.default_rng(0)
    bins = np.concatenate([hidden_runs(128, rng) for _ in range(2000)])
    counts = np.bincount(bins[bins >= 0])
    assert counts.min() > 0.9 * counts.max()
    assert 0.18 < (bins >= 0).mean() < 0.24


def test_what_is_hidden_follows_from_the_document_and_the_window_alone():
    first, second = bytes(range(32, 127)) * 3, b"the quick brown fox " * 20
    alone, after = benchmark([second]).sequences(0), benchmark([first, second]).sequences(1)
    assert [s.tokens.tolist() for s in alone] == [s.tokens.tolist() for s in after]
    places = [tuple(np.flatnonzero(s.tokens == MASK)) for s in [*after, *benchmark([first, second]).sequences(0)]]
    assert len(set(places)) == len(places)
    ids = [s.uid for document in (0, 1) for s in benchmark([first, second]).sequences(document)]
    assert len(set(ids)) == len(ids)


def test_the_documents_and_their_order_are_those_of_docs():
    masked, docs = masked_benchmark(), docs_benchmark()
    assert len(masked) == len(docs)
    assert masked.sample(9, 3) == docs.sample(9, 3)
    assert all(masked.document(d) == docs.document(d) for d in masked.sample(9, 3))
    assert masked.manifest()["source"] == docs.manifest()["source"]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused_in_its_own_name(limit):
    with pytest.raises(UserError, match="of benchmark 'toy' must be at least 1"):
        benchmark([b"a" * 99]).sample(limit, 0)


def test_a_window_in_which_nothing_might_be_hidden_is_refused():
    with pytest.raises(UserError, match=f"at least {SHORTEST_WINDOW}"):
        benchmark([b"a" * 99], SHORTEST_WINDOW - 1)


def test_a_model_gets_windows_that_it_can_hold_and_must_read_bytes():
    whole = MaskedBenchmark("toy", [b"some text " * 60], {})
    short = whole.read_by(BYTES, 100)
    assert max(len(s.tokens) for s in short.sequences(0)) <= 100
    assert json.dumps(short.manifest()) != json.dumps(whole.manifest()) == json.dumps(whole.read_by(BYTES, 4096).manifest())
    with pytest.raises(UserError, match="take a model of bytes"):
        whole.read_by(Encoding("words", 0, BYTES.encode), 100)
    with pytest.raises(UserError, match="at least"):
        whole.read_by(BYTES, 16)
