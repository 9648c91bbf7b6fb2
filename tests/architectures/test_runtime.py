"""Every family in the executing runtime: packed rows over the K/V cache give the plain forward at any uniform depth."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_checkpoints import CONFIGS, tiny
from tiny_library_models import CONFIGS as LIBRARY_CONFIGS
from tiny_library_models import save

from halting_bench.architectures.load import load_model
from halting_bench.architectures.noise import initial_noise
from halting_bench.architectures.user_model import build_user_model
from halting_bench.benchmarks.base import Sequence
from halting_bench.engine.score import execute
from halting_bench.halting.policies import FixedDepth, ThresholdPolicy

EXAMPLE = Path(__file__).parents[2] / "docs" / "my_model.py"
FAMILIES = [*CONFIGS, "example", *(name for name in LIBRARY_CONFIGS if not name.startswith("inkling"))]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    name, folder = request.param, tmp_path_factory.mktemp("model")
    torch.set_num_threads(1)
    if name in LIBRARY_CONFIGS:
        pytest.importorskip("transformers", reason="needs the optional extra: pip install 'halting-bench[transformers]'")
        return load_model(save(name, folder), dtype=torch.float64)
    if name == "example":
        return build_user_model(f"{EXAMPLE}@MyLoopedModel", dtype=torch.float64, device="cpu")
    return load_model(tiny(folder, name), dtype=torch.float64)


def sequences(model) -> list[Sequence]:
    drawn = np.random.default_rng(0).integers(0, min(40, model.spec.vocab_size), (2, 10))
    lengths = (9, 6)
    return [Sequence(i, i, row[:n], row[1 : n + 1]) for i, (row, n) in enumerate(zip(drawn, lengths, strict=True))]


def plain_losses(model, given: list[Sequence], depth: int) -> np.ndarray:
    losses = []
    for sequence in given:
        noise = None
        if model.spec.loops[0].random_start:
            positions = np.arange(len(sequence.tokens))[None]
            noise = initial_noise(0, np.array([[sequence.uid]]), positions, model.spec.width)
        with torch.no_grad():
            log_p = model(torch.from_numpy(sequence.tokens)[None], depth, noise)[0].double().log_softmax(-1)
        losses.append(-log_p.gather(1, torch.from_numpy(sequence.targets)[:, None])[:, 0].numpy())
    return np.concatenate(losses)


@pytest.mark.parametrize("shallow", [True, False])
def test_a_uniform_depth_is_the_plain_forward(model, shallow):
    depth = 1 if shallow else model.spec.mean_recurrence
    given = sequences(model)
    executed = execute(model, given, FixedDepth(depth), max_steps=model.spec.mean_recurrence)
    assert (executed.exit_per_loop == depth).all()
    np.testing.assert_allclose(executed.loss, plain_losses(model, given, depth), rtol=1e-5, atol=1e-5)


def test_rows_that_exit_at_different_depths_run_no_more_steps_than_they_took(model):
    given = sequences(model)
    thresholds = np.geomspace(1e-3, 3, 24)
    for threshold in thresholds:
        policy = ThresholdPolicy("latent-diff", float(threshold))
        executed = execute(model, given, policy, max_steps=model.spec.mean_recurrence)
        if len(set(executed.exit_step.tolist())) > 1:
            break
    assert executed.core_steps == executed.exit_per_loop.sum()
    assert np.isfinite(executed.loss).all()
