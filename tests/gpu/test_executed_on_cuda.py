"""The same laws on a GPU. Nothing here runs, or is claimed, without one."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from halting_bench.architectures.huginn import Huginn
from halting_bench.architectures.load import load_model
from halting_bench.benchmarks.base import Sequence
from halting_bench.engine.decode import decode
from halting_bench.engine.score import execute
from halting_bench.halting.policies import FixedDepth, ThresholdPolicy
from halting_bench.halting.policy import HaltingPolicy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
FOLDER = Path(__file__).parents[1] / "golden" / "huginn"
POLICIES = [ThresholdPolicy("latent-diff", 0.1), ThresholdPolicy("kl", 0.01), FixedDepth(6)]


@pytest.fixture(scope="module")
def on_cpu() -> Huginn:
    return load_model(FOLDER, dtype=torch.float64)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def on_gpu(on_cpu: Huginn) -> Huginn:
    return copy.deepcopy(on_cpu).to("cuda")


def texts() -> list[Sequence]:
    generator = np.random.default_rng(0)
    return [Sequence(i, i, generator.integers(0, 160, n), generator.integers(0, 160, n)) for i, n in enumerate((9, 24, 17))]


def prompts() -> list[list[int]]:
    return [text.tokens[:7].tolist() for text in texts()]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("kv_mode", ["latest", "propagate", "absent"])
def test_scoring_decides_as_on_the_cpu(on_cpu: Huginn, on_gpu: Huginn, policy: HaltingPolicy, kv_mode: str) -> None:
    here, there = (execute(m, texts(), policy, max_steps=12, kv_mode=kv_mode) for m in (on_cpu, on_gpu))
    np.testing.assert_array_equal(here.exit_step, there.exit_step)
    np.testing.assert_allclose(here.loss, there.loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_decoding_makes_the_same_tokens_eager_and_graphed(
    on_cpu: Huginn, on_gpu: Huginn, policy: HaltingPolicy, mode: str
) -> None:
    how = {"max_new_tokens": 12, "max_steps": 12, "slots": 3}
    assert decode(on_gpu, prompts(), policy, mode=mode, **how) == decode(on_cpu, prompts(), policy, **how)  # type: ignore[arg-type]


def test_bfloat16_graphs_decide_as_eager_does(on_gpu: Huginn) -> None:
    model = copy.deepcopy(on_gpu).to(torch.bfloat16)
    how = {"max_new_tokens": 12, "max_steps": 12, "slots": 1}  # one row: batches differ in the last bits of bfloat16
    eager, graphed = (decode(model, prompts(), POLICIES[0], mode=mode, **how) for mode in ("eager", "graph"))  # type: ignore[arg-type]
    assert [r.steps for r in eager] == [r.steps for r in graphed]


def test_out_of_memory_on_the_device_halves_the_slots(on_gpu: Huginn, caplog: pytest.LogCaptureFixture) -> None:
    free, _ = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2**29 / free))
    try:
        results = decode(on_gpu, prompts() * 400, POLICIES[2], max_new_tokens=60, max_steps=12, slots=1200)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(results) == 1200
    assert "out of memory" in caplog.text
