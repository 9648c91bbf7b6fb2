"""Training: seeded, resumable bit for bit, and exported in the public layout."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from halting_bench.architectures.load import load_model
from halting_bench.errors import UserError
from halting_bench.training import train as training
from halting_bench.training.data import Batch, Mixture
from halting_bench.training.objective import draw_depth, forward
from halting_bench.training.recipe import Depth, load_recipe
from halting_bench.training.train import CHECKPOINT, train

WIDTH = 16
SMALL = {
    "batch_tokens": 96,
    "depth": {"mean": 3, "cap": 6, "backprop": 2},
    "mixture": [{"task": "shell"}, {"task": "hop", "weight": 2}],
    "checkpoint_every": 2,
    "log_every": 1000,
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_same_recipe_gives_the_same_weights_and_another_seed_others(
    write: Callable[..., Path], tmp_path: Path, precision: str
) -> None:
    folders = [
        train(write(**SMALL, precision=precision, seed=seed), tmp_path / str(index), device="cpu")
        for index, seed in enumerate((0, 0, 1))
    ]
    assert same(weights(folders[0]), weights(folders[1]))
    assert not same(weights(folders[0]), weights(folders[2]))


def test_a_killed_and_resumed_run_equals_one_never_killed(write: Callable[..., Path], tmp_path: Path) -> None:
    recipe = write(**SMALL | {"steps": 80, "log_every": 40})
    whole = train(recipe, tmp_path / "whole", device="cpu")
    out = tmp_path / "killed"
    code = "import sys, pathlib; from halting_bench.training.train import train; train(*map(pathlib.Path, sys.argv[1:]))"
    child = subprocess.Popen(
        [sys.executable, "-c", code, recipe, out], env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL
    )
    waited = time.monotonic()
    while not (out / CHECKPOINT).exists():
        assert child.poll() is None and time.monotonic() - waited < 120
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not (out / "model.safetensors").exists(), "it ended before it could be killed"
    train(recipe, out, device="cpu")
    assert same(weights(whole), weights(out))
    logs = [
        [json.loads(line) | {"seconds": 0} for line in (folder / "log.jsonl").read_text().splitlines()]
        for folder in (whole, out)
    ]
    assert logs[0] == logs[1] and [entry["step"] for entry in logs[0]] == [40, 80]


def test_a_finished_folder_holds_the_public_layout_and_is_left_alone(write: Callable[..., Path], tmp_path: Path) -> None:
    recipe = write(**SMALL, export="bfloat16")
    out = train(recipe, tmp_path / "out", device="cpu")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "log.jsonl", "model.safetensors", "recipe.yaml"]
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "huginn_raven" and config["tokenizer"] == "bytes" and config["n_embd"] == WIDTH
    tensors = weights(out)
    assert "transformer.core_block.0.attn.Wqkv.weight" in tensors and "lm_head.weight" not in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    before = (out / "model.safetensors").stat().st_mtime_ns
    train(recipe, out, device="cpu")
    assert (out / "model.safetensors").stat().st_mtime_ns == before


def test_exported_weights_load_as_the_model_that_was_trained(write: Callable[..., Path], tmp_path: Path) -> None:
    out = train(write(**SMALL), tmp_path / "out", device="cpu")
    run = training.Run(load_recipe(out / "recipe.yaml"), torch.device("cpu"), tmp_path)
    with torch.no_grad():
        for name, parameter in run.parameters.items():
            parameter.copy_(weights(out)[name])
    tokens = torch.randint(256, (2, 9))
    assert torch.equal(load_model(out)(tokens, 3), run.model(tokens, 3))


def test_a_checkpoint_of_another_recipe_is_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    first = write(**SMALL)
    out = tmp_path / "out"
    out.mkdir()
    run = training.Run(load_recipe(first), torch.device("cpu"), out)
    run.step()
    run.save()
    with pytest.raises(UserError, match="of another recipe"):
        train(write(**SMALL, seed=5), out, device="cpu")
    train(write(**SMALL, seed=5), out, device="cpu", resume=False)


def test_checkpoints_hold_no_pickle_and_leave_no_partial_file(write: Callable[..., Path], tmp_path: Path) -> None:
    run = training.Run(load_recipe(write(**SMALL)), torch.device("cpu"), tmp_path)
    run.step()
    run.save()
    header = (tmp_path / CHECKPOINT).read_bytes()[8:]
    assert header.startswith(b"{") and not list(tmp_path.glob("*.partial"))
    keys = load_file(tmp_path / CHECKPOINT)
    assert any(key.startswith("muon/") for key in keys) and any(key.endswith("exp_avg_sq") for key in keys)


def test_muon_has_the_matrices_inside_blocks_and_adamw_the_rest(write: Callable[..., Path], tmp_path: Path) -> None:
    run = training.Run(load_recipe(write(**SMALL)), torch.device("cpu"), tmp_path)
    groups = {
        label: {id(p) for group in optimizer.param_groups for p in group["params"]}
        for label, optimizer in run.optimizers.items()
    }
    for name, parameter in run.parameters.items():
        expected = "muon" if parameter.ndim == 2 and "wte" not in name else "adamw"
        assert [label for label, members in groups.items() if id(parameter) in members] == [expected], name


def test_gradients_reach_every_parameter_in_either_precision(write: Callable[..., Path], tmp_path: Path) -> None:
    for precision in ("float32", "bfloat16"):
        run = training.Run(load_recipe(write(**SMALL, precision=precision)), torch.device("cpu"), tmp_path)
        tokens = torch.randint(256, (2, 9))
        noise = torch.randn(2, 9, WIDTH)
        with run._precision():
            forward(run.model, tokens, noise, [5], 2).float().square().sum().backward()
        assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in run.parameters.values())


def test_back_propagation_stops_after_the_last_loops(write: Callable[..., Path], tmp_path: Path) -> None:
    model = training.Run(load_recipe(write(**SMALL)), torch.device("cpu"), tmp_path).model
    calls = []
    step = model.step
    model.step = lambda *arguments: (calls.append(torch.is_grad_enabled()), step(*arguments))[1]  # type: ignore[method-assign]
    forward(model, torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, WIDTH), [5], 2)
    assert calls == [False, False, False, True, True]


def test_depths_are_around_the_mean_and_never_above_the_cap(write: Callable[..., Path]) -> None:
    recipe = load_recipe(write(depth=Depth(mean=8, cap=32, long=0.0).model_dump()))
    depths = [draw_depth(recipe, np.random.default_rng([0, step])) for step in range(4000)]
    assert min(depths) >= 1 and max(depths) <= 32
    assert np.mean(depths) == pytest.approx(9, abs=0.3)  # a Poisson of mean 8, and one
    longer = load_recipe(write(depth=Depth(mean=8, cap=32, long=1.0).model_dump()))
    assert {draw_depth(longer, np.random.default_rng([0, step])) for step in range(4000)} == set(range(8, 33))


def test_the_curriculum_rises_on_its_own_level_with_enough_loops_only(write: Callable[..., Path]) -> None:
    mixture = Mixture(load_recipe(write()), None)
    right = np.ones((1, 3), bool)

    def learn(level: int, loops: int, correct: np.ndarray = right) -> int:
        batch = Batch("shell", level, np.zeros((1, 3)), np.zeros((1, 3)), np.array([[False, True, True]]))
        for _ in range(20):
            mixture.learn(progress, batch, correct, loops)
        return progress.level["shell"]

    progress = mixture.start()
    assert learn(0, loops=7) == 0
    assert learn(1, loops=8) == 0
    assert learn(0, loops=8, correct=np.array([[True, True, False]])) == 0
    assert learn(0, loops=8) == 1
    for level in range(1, 8):
        learn(level, loops=8)
    assert progress.level["shell"] == mixture.tasks["shell"].trained - 1


def test_batches_hold_about_the_tokens_of_their_share(write: Callable[..., Path]) -> None:
    recipe = load_recipe(write(**SMALL | {"batch_tokens": 3000}))
    mixture = Mixture(recipe, None)
    progress = mixture.start()
    progress.level["hop"] = 5
    drawn = {batch.source: batch.tokens.size for batch in mixture.draw(np.random.default_rng(0), progress)}
    assert drawn["shell"] == pytest.approx(1000, abs=20) and drawn["hop"] == pytest.approx(2000, abs=110)


def test_a_text_run_trains_on_windows_of_its_corpus(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = np.frombuffer((b"\0" + b"abcdefgh" * 40) * 4 + b"\0", np.uint8)
    monkeypatch.setattr(training.corpora, "build", lambda spec: training.corpora.Corpus(stream, stream, {"bytes": stream.size}))
    corpus = {"sources": [{"kind": "npm", "package": "words", "extract": "text"}]}
    recipe = write(
        **SMALL | {"mixture": [{"task": "text"}, {"task": "s3"}], "window": 24, "corpus": corpus, "document_start": 1.0}
    )
    out = train(recipe, tmp_path / "out", device="cpu")
    last = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert last["corpus"] == {"bytes": stream.size} and set(last["held_out"]) == {"text", "s3"}
    mixture = Mixture(load_recipe(recipe), training.corpora.Corpus(stream, stream, {}))
    batch = mixture.draw(np.random.default_rng(0), mixture.start())[0]
    assert (batch.tokens[:, 0] == 0).all() and (batch.tokens[:, 1:] == batch.targets[:, :-1]).all()


def test_an_unknown_device_says_what_to_type() -> None:
    with pytest.raises(UserError, match="type 'cpu'"):
        training.pick_device("gpu")
