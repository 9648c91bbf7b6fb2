"""The bundled cards: a sample of each table, recomputed from the weights."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from halting_bench.architectures.load import load_model
from halting_bench.architectures.noise import initial_noise
from halting_bench.benchmarks.base import NOT_SCORED, Benchmark, Sequence
from halting_bench.benchmarks.procedural import Shell
from halting_bench.errors import UserError
from halting_bench.records import Metric
from halting_bench.training import card as card_module
from halting_bench.training.card import DEPTHS, resolve, sample, scores_by_depth, table, write_card
from halting_bench.training.train import train

FOLDERS = sorted(path.parent for path in Path(__file__).parents[2].glob("models/*/card.yaml"))
bundled = pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)


def read(folder: Path) -> dict[str, Any]:
    card: dict[str, Any] = yaml.safe_load((folder / "card.yaml").read_text())
    return card


@bundled
def test_a_card_names_its_weights_by_their_hash(folder: Path) -> None:
    card = read(folder)
    data = (folder / card["weights"]).read_bytes()
    assert hashlib.sha256(data).hexdigest() == card["weights_sha256"] and len(data) == card["weights_bytes"]
    assert len(data) <= 4_000_000


@bundled
def test_a_sample_of_each_table_recomputed_from_the_weights_agrees(folder: Path) -> None:
    card, model = read(folder), load_model(folder)
    assert list(card["tables"]) == card["benchmarks"]
    for name, told in card["tables"].items():
        found = sample(model, resolve(name))
        assert found["positions"] == told["sample"]["positions"]
        assert found["all"] == pytest.approx(told["sample"]["all"], abs=2e-3), name


@bundled
def test_a_table_has_every_depth_in_all_and_by_subset(folder: Path) -> None:
    for told in read(folder)["tables"].values():
        assert told["depths"] == list(DEPTHS)
        family = next(key for key in ("level", "class", "run") if key in told)
        rows = [told["all"], *told[family].values()]
        assert all(len(row) == len(DEPTHS) for row in rows)


class Fixed(Benchmark):
    """Two sequences of different lengths, the second with one position that is not scored."""

    name, metric = "fixed", Metric.BITS_PER_BYTE
    subset_names = {"level": ("1", "2")}  # noqa: RUF012 - declared by Benchmark

    def manifest(self) -> dict:
        return {}

    def sample(self, limit: int | None, seed: int) -> list[int]:
        return [0]

    def sequences(self, document: int) -> list[Sequence]:
        first = Sequence(0, 0, np.array([1, 2, 3]), np.array([2, 3, 4]), {"level": np.array([0, 0, 1])})
        second = Sequence(0, 1, np.array([5, 6]), np.array([NOT_SCORED, 7]), {"level": np.array([-1, 1])})
        return [first, second]


def test_scores_are_those_of_a_plain_forward_at_each_depth(write: Callable[..., Path], tmp_path: Path) -> None:
    model = load_model(train(write(), tmp_path / "out", device="cpu"))
    sequences = Fixed().sequences(0)
    scores = scores_by_depth(model, sequences, Metric.BITS_PER_BYTE, (1, 3))
    assert scores.shape == (2, 5) and np.isnan(scores[:, 3]).all()
    for row, depth in enumerate((1, 3)):
        expected = []
        for sequence in sequences:
            noise = initial_noise(0, np.array([[sequence.uid]]), np.arange(len(sequence.tokens))[None], model.spec.width)
            logits = model(torch.from_numpy(sequence.tokens)[None], depth, noise.float())[0]
            bits = -torch.log_softmax(logits, -1).numpy() / np.log(2)
            expected += [bits[t, target] if target >= 0 else np.nan for t, target in enumerate(sequence.targets)]
        np.testing.assert_allclose(scores[row], expected, rtol=1e-4)
    found = table(model, Fixed(), None, (1, 3))
    assert found["positions"] == 4
    assert found["all"] == pytest.approx(np.nanmean(scores, axis=1), abs=1e-4)
    assert found["level"]["1"] == pytest.approx(scores[:, :2].mean(axis=1), abs=1e-4)


def test_a_card_is_written_from_a_trained_folder_and_is_plain_yaml(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_module, "DOCUMENTS", 3)
    folder = train(write(benchmarks=["shell"]), tmp_path / "out", device="cpu")
    card = yaml.safe_load(write_card(folder).read_text())
    assert card["training"]["steps"] == 4 and card["tables"]["shell"]["documents"] == 3
    assert set(card["tables"]["shell"]["level"]) == set(Shell().subset_names["level"])
    assert card["trained_on"] == ["procedural task 'shell', whose curriculum reached level 1-2 of 11-12"]


def test_an_unknown_benchmark_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'shell'"):
        resolve("shel")
