"""The reference's own adaptive decoding, token by token and step by step."""

import json
from pathlib import Path

import pytest
import torch

from halting_bench.architectures.huginn import Huginn
from halting_bench.architectures.load import load_model, read_config
from halting_bench.engine.decode import decode
from halting_bench.engine.masked_reference import MaskedReference
from halting_bench.halting.policies import FixedDepth, ThresholdPolicy
from halting_bench.halting.policy import HaltingPolicy

torch.set_num_threads(1)
FOLDER = Path(__file__).parents[1] / "golden" / "huginn"
GOLDEN = json.loads((FOLDER / "decode.json").read_text(encoding="utf-8"))
OUR_NAMES = {"minp-kl": "min-p-kl", "argmax-stability": "argmax-stable"}


@pytest.fixture(scope="module")
def model() -> Huginn:
    """The golden model, started from zeros as the runs were."""
    zeros = Huginn({**read_config(FOLDER), "state_init": "zero"}).eval().requires_grad_(False)
    zeros.load_state_dict(load_model(FOLDER).state_dict())
    return zeros


def policy_of(run: str) -> HaltingPolicy:
    name, _, threshold = run.partition("@")
    if name == "none":
        return FixedDepth(GOLDEN["max_steps"])
    return ThresholdPolicy(OUR_NAMES.get(name, name), float(threshold))


@pytest.mark.parametrize("run", GOLDEN["runs"])
def test_decoding_reproduces_tokens_and_steps(model: Huginn, run: str) -> None:
    wanted = GOLDEN["runs"][run]
    [result] = decode(
        model,
        [GOLDEN["prompt"]],
        policy_of(run),
        max_new_tokens=len(wanted["tokens"]),
        max_steps=GOLDEN["max_steps"],
        slots=1,
        prefill="shared",
        kv_mode="latest",
    )
    assert result.tokens == wanted["tokens"]
    assert result.steps == wanted["steps"]
    assert set(result.prompt_steps) == {wanted["steps"][0]}


def test_all_runs_of_one_signal_share_a_batch_through_their_own_thresholds(model: Huginn) -> None:
    runs = [run for run in GOLDEN["runs"] if run.startswith("latent-diff")]
    results = decode(
        model,
        [GOLDEN["prompt"]] * len(runs),
        ThresholdPolicy("latent-diff", threshold=0.0),
        max_new_tokens=20,
        max_steps=GOLDEN["max_steps"],
        slots=len(runs),
        prefill="shared",
        thresholds=[float(run.partition("@")[2]) for run in runs],
    )
    for run, result in zip(runs, results, strict=True):
        assert result.tokens == GOLDEN["runs"][run]["tokens"]
        assert result.steps == GOLDEN["runs"][run]["steps"]


@pytest.mark.parametrize("run", ["latent-diff@0.1", "kl@0.01"])
def test_the_masked_reference_reproduces_the_first_tokens_and_steps(model: Huginn, run: str) -> None:
    reference = MaskedReference(model, policy_of(run), max_steps=GOLDEN["max_steps"])
    row = reference.feed(GOLDEN["prompt"], shared=True)[-1]
    tokens, steps = [], []
    for _ in range(5):
        assert row.logits is not None
        tokens.append(int(row.logits.argmax()))
        steps += row.steps
        [row] = reference.feed(tokens[-1:])
    assert tokens == GOLDEN["runs"][run]["tokens"][:5]
    assert steps == GOLDEN["runs"][run]["steps"][:5]
