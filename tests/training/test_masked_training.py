"""Training on hidden bytes of a corpus: what is asked, by whom, and that a step of it is a function of seed and number."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from halting_bench.benchmarks.base import NOT_SCORED
from halting_bench.benchmarks.masked import MASK, SURELY_HIDING, hidden_runs
from halting_bench.errors import UserError
from halting_bench.training import corpus as corpora
from halting_bench.training.card import build_card
from halting_bench.training.data import Mixture
from halting_bench.training.recipe import load_recipe
from halting_bench.training.train import Run, train

ENCODER = {
    "family": "self_transformer",
    "config": {
        "vocab_size": 256, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16,
        "max_position_embeddings": 128, "mean_recurrence": 3, "damping": 0.5, "norm_eps": 1e-6, "rope_theta": 1000.0,
    },
    "mixture": [{"task": "masked"}],
    "corpus": {"sources": [{"kind": "npm", "package": "words", "extract": "text"}]},
    "window": 32,
    "batch_tokens": 128,
    "depth": {"mean": 3, "cap": 6, "backprop": 6},
}  # fmt: skip


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> corpora.Corpus:
    """Short documents, so that windows hold several beginnings."""
    stream = np.frombuffer(b"\0".join([b"", *[b"abcdefgh ijkl" * 3] * 9, b""]), np.uint8)
    found = corpora.Corpus(stream, stream, {"bytes": stream.size})
    monkeypatch.setattr(corpora, "build", lambda spec: found)
    return found


def test_hidden_bytes_are_the_targets_and_no_beginning_of_a_document_is_hidden(
    write: Callable[..., Path], corpus: corpora.Corpus
) -> None:
    mixture = Mixture(load_recipe(write(**ENCODER)), corpus)
    stream = corpus.train.tobytes()
    beginnings = 0
    for step in range(20):
        (batch,) = mixture.draw(np.random.default_rng([0, step]), mixture.start())
        hidden = batch.targets != NOT_SCORED
        np.testing.assert_array_equal(batch.tokens == MASK, hidden)
        assert batch.tokens.shape == (4, 32) and hidden.any(axis=1).all() and not (batch.targets == 0).any()
        beginnings += int((batch.tokens == 0).sum())
        for row in np.where(hidden, batch.targets, batch.tokens):
            assert bytes(row.tolist()) in stream
    assert beginnings > 20


def test_a_resumed_run_equals_one_that_went_through(write: Callable[..., Path], tmp_path: Path, corpus: corpora.Corpus) -> None:
    recipe = write(**ENCODER)
    whole, halves = train(recipe, tmp_path / "whole", device="cpu"), tmp_path / "halves"
    halves.mkdir()
    first = Run(load_recipe(recipe), torch.device("cpu"), halves)
    losses = [first.step() for _ in range(2)]
    first.save()
    train(recipe, halves, device="cpu")
    both = [load_file(folder / "model.safetensors") for folder in (whole, halves)]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0]) and both[0].keys() == both[1].keys()
    assert all(abs(loss - np.log(256)) < 1 for loss in losses)
    entry = json.loads((whole / "log.jsonl").read_text().splitlines()[-1])
    assert set(entry["held_out"]) == {"masked"} and entry["corpus"] == {"bytes": corpus.train.size}


def test_a_card_of_such_a_model_says_what_it_read(write: Callable[..., Path], tmp_path: Path, corpus: corpora.Corpus) -> None:
    card = build_card(train(write(**ENCODER), tmp_path / "out", device="cpu"))
    assert card["trained_on"] == [
        f"hidden bytes of text of the packages in recipe.yaml ({corpus.train.size} bytes, sha256 unknown)"
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (ENCODER | {"mixture": [{"task": "text"}]}, "task 'text' is not for 'self_transformer', which sees both sides"),
        (
            {key: ENCODER[key] for key in ("mixture", "corpus", "window")},
            "task 'masked' is not for 'huginn_raven', which sees the left side only",
        ),
    ],
    ids=["text for an encoder", "masked for a decoder"],
)
def test_a_task_for_models_that_see_more_or_less_is_refused(
    write: Callable[..., Path], tmp_path: Path, changes: dict, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        train(write(**changes), tmp_path / "out", device="cpu")


@pytest.mark.parametrize(
    ("window", "told"),
    [
        (0, r"window: Input should be greater than 0 \(got 0\)"),
        (21, "in a window of 21 bytes 'masked' may hide none: give at least 22"),
        (129, "window 129 is longer than the 128 positions of 'self_transformer'"),
    ],
)
def test_a_window_that_cannot_be_trained_on_is_refused(
    write: Callable[..., Path], tmp_path: Path, corpus: corpora.Corpus, window: int, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        train(write(**ENCODER | {"window": window}), tmp_path / "out", device="cpu")


def test_the_shortest_window_always_hides_something() -> None:
    assert all((hidden_runs(SURELY_HIDING, np.random.default_rng(seed)) >= 0).any() for seed in range(2000))
    assert not all((hidden_runs(SURELY_HIDING - 1, np.random.default_rng(seed)) >= 0).any() for seed in range(2000))
