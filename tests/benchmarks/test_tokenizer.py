"""Tokenizers of a checkpoint: ids, bytes a token, and every way in which one may not fit."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from halting_bench.benchmarks.text import TextBenchmark
from halting_bench.benchmarks.tokenizer import ByteTokenizer, load_tokenizer
from halting_bench.errors import UserError

TEXT = "The loop runs again, und die Schleife läuft weiter: ∀x. 循环 🙂\n  The loop ends."


@pytest.fixture
def folder(tmp_path):
    """A folder with a byte-level BPE of 300 ids and a beginning-of-document token."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.enable_truncation(4)  # as some published files have it
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    return tmp_path


def test_a_text_comes_back_whole(folder):
    tokenizer = load_tokenizer(folder, {}, 300)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert 4 < len(ids) < len(TEXT.encode())


def test_the_bytes_of_its_tokens_are_the_bytes_of_the_text(folder):
    encoding = load_tokenizer(folder, {}, 300).encoding()
    tokens = encoding.encode(TEXT.encode())
    assert tokens.byte_counts.sum() == len(TEXT.encode())
    assert (tokens.byte_counts >= 0).all()
    assert len(tokens.ids) == len(tokens.byte_counts)
    assert encoding.start == 0


def test_bytes_that_no_token_covers_are_counted_still(folder):
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.Strip()
    backend.save(str(folder / "tokenizer.json"))
    tokens = load_tokenizer(folder, {}, 300).encoding().encode(b"  The loop  ")
    assert tokens.byte_counts.sum() == 12


def test_every_token_begins_inside_the_text(folder):
    """A character of several tokens is the last one's, so that even a text that ends with one has no token behind its end."""
    text = "The loop 🙂".encode()
    tokens = load_tokenizer(folder, {}, 300).encoding().encode(text)
    assert (tokens.byte_counts.cumsum() - tokens.byte_counts < len(text)).all()
    assert tokens.byte_counts[-1] == 4


def test_a_text_benchmark_is_read_by_it(folder):
    documents = TextBenchmark("text:x", [TEXT.encode(), b"The loop"], {})
    read = documents.read_by(load_tokenizer(folder, {}, 300).encoding(), 256)
    assert len(read.sequences(1)[0].tokens) < len(documents.sequences(1)[0].tokens)
    assert read.manifest()["encoding"].startswith("tokenizer.json:")
    assert read.manifest()["bytes"] == documents.manifest()["bytes"]


def test_an_empty_text_has_no_tokens(folder):
    tokens = load_tokenizer(folder, {}, 300).encoding().encode(b"")
    assert len(tokens.ids) == len(tokens.byte_counts) == 0


def test_its_name_follows_its_content(folder):
    before = load_tokenizer(folder, {}, 300).encoding().name
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["<new>"])
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder, {}, 301).encoding().name != before


@pytest.mark.parametrize(
    ("settings", "config", "start"),
    [({"bos_token": "<s>"}, {"bos_token_id": 7}, 0), ({}, {"bos_token_id": 7}, 7), ({}, {"eos_token_id": 9}, 9)],
)
def test_a_document_begins_with_bos_or_else_eos(settings, config, start, folder):
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(folder, config, 300).encoding().start == start


def test_without_a_file_a_byte_model_reads_bytes(tmp_path):
    for where in (tmp_path, None):
        tokenizer = load_tokenizer(where, {}, 256)
        assert isinstance(tokenizer, ByteTokenizer)
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
        assert tokenizer.encoding().encode(TEXT.encode()).ids.tolist() == tokenizer.encode(TEXT)


def empty(folder):
    (folder / "tokenizer.json").write_bytes(b"")


def broken(folder):
    (folder / "tokenizer.json").write_text('{"model": 1}')


def link(folder):
    (folder / "tokenizer.json").rename(folder.parent / "tokenizer.json")
    (folder / "tokenizer.json").symlink_to(folder.parent / "tokenizer.json")


def only_old_form(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"x")


def gone(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    ("mend", "vocab_size", "message"),
    [
        (lambda folder: None, 200, "gives ids up to 299, the model knows 200: it belongs to another model"),
        (empty, 300, "is empty"),
        (broken, 300, "is not a tokenizer"),
        (link, 300, "link out of its folder"),
        (only_old_form, 300, "has tokenizer.model but no tokenizer.json"),
        (gone, 32000, "has no tokenizer.json, and 32000 ids are not bytes"),
        (gone, 100, "100 ids are not bytes"),
    ],
)
def test_a_missing_or_mismatched_tokenizer_is_one_clear_line(mend, vocab_size, message, folder):
    mend(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(folder, {}, vocab_size)
    assert "\n" not in str(caught.value)


def test_no_token_to_begin_with_is_one_clear_line(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="has no token to begin a document with"):
        load_tokenizer(folder, {}, 300).encoding()
