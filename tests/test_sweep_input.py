"""What a sweep refuses before any work is done: one line, nothing written."""

from pathlib import Path

import pytest
import torch
from toy_sweeps import settings

from halting_bench.architectures.toy import write_toy
from halting_bench.errors import UserError
from halting_bench.jobs import plan_sweep
from halting_bench.sweeping.run import sweep


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("input")


def refused(folder: Path, tmp_path: Path, **changes: object) -> str:
    with pytest.raises(UserError) as error:
        sweep(settings(folder, **changes), out=tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"policies": ("kll",)}, "unknown policy 'kll': did you mean 'kl'?"),
        ({"models": ("toi",)}, "unknown model 'toi': "),
        ({"benchmarks": ("shel",)}, "unknown benchmark 'shel': did you mean 'shell'?"),
        ({"kv_mode": "latst"}, "unknown kv_mode 'latst': did you mean 'latest'?"),
        ({"kv_mode": "full"}, "kv_mode 'full' saves no work and is never executed: type one of "),
        ({"prefill": "ful"}, "unknown prefill 'ful': did you mean 'full'?"),
        ({"max_steps": 3}, "max_steps 3 is below the trained depth 4 of 'toy': give at least that"),
        ({"benchmarks": ("text:/no/such/path",)}, "/no/such/path"),
        (
            {"benchmarks": ("masked",)},
            "benchmark 'masked' is for encoders, 'toy' sees the left side only: take a non-causal model",
        ),
        (
            {"benchmarks": ("roots",)},
            "benchmark 'roots' is for encoders, 'toy' sees the left side only: take a non-causal model",
        ),
        (
            {"models": ("self-expressions",), "benchmarks": ("docs",)},
            "benchmark 'docs' asks for the next token, 'self-expressions' sees it: take a causal model, or 'masked'",
        ),
        ({"models": ("self-tiny",), "benchmarks": ("masked",)}, "576 ids are not bytes"),
    ],
)
def test_names_and_depths_that_cannot_be(folder: Path, tmp_path: Path, changes: dict, told: str):
    assert told in refused(folder, tmp_path, **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there(folder: Path, tmp_path: Path):
    assert "use --device cpu" in refused(folder, tmp_path, device="cuda")


TEXTS = {"empty": b"", "binary": b"a\0b", "latin1": b"caf\xe9 and more", "one document": b"too short to be two"}


@pytest.mark.parametrize("kind", TEXTS)
def test_text_that_cannot_be_scored(folder: Path, tmp_path: Path, kind: str):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXTS[kind])
    assert str(path) in refused(folder, tmp_path, benchmarks=(f"text:{path}",))


def test_more_steps_than_a_model_has_loops(folder: Path, tmp_path: Path):
    ouro = write_toy(tmp_path / "looped", "ouro")
    told = refused(folder, tmp_path, models=(str(ouro),), max_steps=7)
    assert "model 'looped' has 6 loops and no more: max_steps 7 is too large" in told
    assert plan_sweep(settings(folder, models=(str(ouro),), max_steps=None)).summary()["jobs"][0]["max_steps"] == 6


def broken_weights(folder: Path, kind: str) -> Path:
    weights = folder / "model.safetensors"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif kind == "no weights":
        weights.unlink()
    elif kind == "a pickle":
        weights.unlink()
        torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("kind", ["truncated", "no weights", "a pickle"])
def test_a_checkpoint_that_cannot_be_loaded(folder: Path, tmp_path: Path, kind: str):
    toy = broken_weights(write_toy(tmp_path / "toy"), kind)
    assert str(toy) in refused(folder, tmp_path, models=(str(toy),))


def test_two_policies_of_one_name(folder: Path, tmp_path: Path):
    (tmp_path / "kl.yaml").write_text("name: kl\nsource: mine\nsignal: kl\n")
    assert "two policies are called 'kl': rename one of them" in refused(
        folder, tmp_path, policies=("kl", str(tmp_path / "kl.yaml"))
    )


def test_a_policy_given_twice_is_one(folder: Path):
    assert plan_sweep(settings(folder, policies=("kl", "kl"))).summary()["jobs"][0]["policies"] == 1


def test_text_benchmarks_of_like_names_do_not_share_a_folder(folder: Path, tmp_path: Path):
    (tmp_path / "a").mkdir()
    names = []
    for path in (tmp_path / "a" / "b", tmp_path / "a-b"):
        path.mkdir()
        for i in range(2):
            (path / f"{i}.txt").write_text("some text")
        names.append(f"text:{path}")
    try:
        plan = plan_sweep(settings(folder, benchmarks=tuple(names)))
    except UserError as error:
        assert "would be kept under" in str(error)
    else:
        assert len({unit.key for job in plan.jobs for unit in job.units}) == 2
