"""Laws of the text benchmarks: windows, scoring, subsets, sampling."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halting_bench.benchmarks.base import NOT_SCORED
from halting_bench.benchmarks.classes import CLASS_NAMES, class_codes
from halting_bench.benchmarks.text import BYTES, Encoding, TextBenchmark, Tokens
from halting_bench.errors import UserError

DOCUMENT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=600).map(str.encode)


def benchmark(documents: list[bytes], window: int = 8, stride: int = 5, **options: Encoding) -> TextBenchmark:
    return TextBenchmark("toy", documents, {"kind": "toy"}, window=window, stride=stride, **options)


@given(st.lists(DOCUMENT, min_size=1, max_size=3), st.integers(1, 40), st.data())
def test_every_byte_of_every_document_is_scored_exactly_once(documents, window, data):
    toy = benchmark(documents, window, data.draw(st.integers(1, window)))
    for document, text in enumerate(documents):
        scored = [target for s in toy.sequences(document) for target in s.targets if target != NOT_SCORED]
        assert bytes(scored) == text


@given(DOCUMENT, st.integers(1, 40), st.data())
def test_no_window_is_longer_than_it_may_be_and_each_scores_something(text, window, data):
    toy = benchmark([text], window, data.draw(st.integers(1, window)))
    for sequence in toy.sequences(0):
        assert 0 < len(sequence.tokens) == len(sequence.targets) <= window
        assert (sequence.targets != NOT_SCORED).any()


@given(DOCUMENT)
def test_each_input_is_the_token_before_its_target_and_the_first_one_is_nul(text):
    whole = np.frombuffer(b"\0" + text, dtype=np.uint8)
    for number, sequence in enumerate(benchmark([text]).sequences(0)):
        start = number * 5
        np.testing.assert_array_equal(sequence.tokens, whole[start : start + len(sequence.tokens)])
        scored = sequence.targets != NOT_SCORED
        np.testing.assert_array_equal(sequence.targets[scored], whole[start + 1 :][: len(scored)][scored])


@given(DOCUMENT)
def test_codes_name_the_class_and_the_place_of_the_scored_byte(text):
    for number, sequence in enumerate(benchmark([text]).sequences(0)):
        for family, codes in sequence.codes.items():
            assert codes.dtype == np.int16
            np.testing.assert_array_equal(codes == -1, sequence.targets == NOT_SCORED)
            assert codes.max() < len(benchmark([text]).subset_names[family])
        scored = np.flatnonzero(sequence.targets != NOT_SCORED)
        expected = class_codes(sequence.targets[scored].astype(np.uint8))
        np.testing.assert_array_equal(sequence.codes["class"][scored], expected)
        places = [sum(number * 5 + i >= edge for edge in (16, 64, 256, 1024)) for i in scored]
        assert sequence.codes["position"][scored].tolist() == places


def test_a_byte_belongs_to_the_class_that_its_character_says():
    codes = class_codes(np.frombuffer("a Z\n9_é\x07".encode(), dtype=np.uint8))
    names = [CLASS_NAMES[code] for code in codes]
    assert names == ["letters", "whitespace", "letters", "whitespace", "digits", "punctuation", "other", "other", "other"]


def test_later_windows_score_with_the_overlap_as_context():
    sequences = benchmark([b"abcdefghijklm"]).sequences(0)
    assert [bytes(s.tokens.tolist()) for s in sequences] == [b"\0abcdefg", b"efghijkl"]
    assert [int((s.targets == NOT_SCORED).sum()) for s in sequences] == [0, 3]


def test_the_same_document_gives_the_same_sequences_and_no_two_share_an_id():
    toy = benchmark([b"abcdefghijklmnop" * 3, b"xyz" * 9])
    first, again = toy.sequences(0), toy.sequences(0)
    assert all((a.tokens == b.tokens).all() and a.uid == b.uid for a, b in zip(first, again, strict=True))
    ids = [s.uid for document in (0, 1) for s in toy.sequences(document)]
    assert len(set(ids)) == len(ids)


@given(st.integers(0, 2**31), st.integers(1, 60))
def test_a_limited_sample_is_a_prefix_of_the_whole_seeded_order(seed, limit):
    toy = benchmark([b"a"] * 50)
    whole = toy.sample(None, seed)
    assert sorted(whole) == list(range(50))
    assert toy.sample(limit, seed) == whole[:limit]


def test_another_seed_gives_another_order():
    toy = benchmark([b"a"] * 50)
    assert toy.sample(None, 0) != toy.sample(None, 1)


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_below_one_is_refused(limit):
    with pytest.raises(UserError, match="at least 1"):
        benchmark([b"a"]).sample(limit, 0)


@pytest.mark.parametrize("stride", [0, 9])
def test_windows_that_would_leave_bytes_out_are_refused(stride):
    with pytest.raises(UserError, match="stride"):
        benchmark([b"a"], window=8, stride=stride)


def test_the_manifest_is_json_and_changes_with_what_decides_the_score():
    manifests = [benchmark([b"abc"], 8, 5), benchmark([b"abcd"], 8, 5), benchmark([b"abc"], 9, 5), benchmark([b"abc"], 8, 4)]
    assert len({json.dumps(toy.manifest(), sort_keys=True) for toy in manifests}) == 4


def test_tokens_of_several_bytes_keep_their_place_in_bytes():
    def pairs(text: bytes) -> Tokens:
        counts = np.full(len(text) // 2, 2)
        return Tokens(1000 + np.frombuffer(text, dtype=np.uint8)[::2].astype(np.int64), counts)

    toy = benchmark([b"a " * 20], window=64, stride=64, encoding=Encoding("pairs", 999, pairs))
    (sequence,) = toy.sequences(0)
    assert sequence.tokens[0] == 999 and (sequence.targets == 1000 + ord("a")).all()
    assert [int(code) for code in sequence.codes["position"]] == [0] * 8 + [1] * 12
    assert {CLASS_NAMES[code] for code in sequence.codes["class"]} == {"letters"}
    assert len(toy.document(0)) == 40


def test_a_model_that_holds_less_than_a_window_reads_shorter_ones_as_another_benchmark():
    whole = TextBenchmark("t", [bytes(range(1, 200)) * 3], {})
    short = whole.read_by(BYTES, 128)
    assert max(len(s.tokens) for s in short.sequences(0)) <= 128
    assert sum(int((s.targets >= 0).sum()) for s in short.sequences(0)) == 597
    assert short.manifest() != whole.manifest() == whole.read_by(BYTES, 4096).manifest()
