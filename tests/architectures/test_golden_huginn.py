"""Huginn against numbers of the public implementation (float32, rtol = atol = 1e-5)."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.load import load_model

FOLDER = Path(__file__).parents[1] / "golden" / "huginn"


def test_embedding_states_and_logits_of_every_step():
    golden, model = load_file(FOLDER / "golden.safetensors"), load_model(FOLDER)
    context = DenseContext(golden["input_ids"].shape[1])
    x = model.embed(golden["input_ids"], context)
    torch.testing.assert_close(x, golden["embedded"], rtol=1e-5, atol=1e-5)
    state = golden["state_0"]
    for k in range(12):
        state = model.step(0, state, x, context)
        torch.testing.assert_close(state, golden["states"][k], rtol=1e-5, atol=1e-5)
        logits = model.readout(model.end(0, state, context), context)
        torch.testing.assert_close(logits, golden["logits"][k], rtol=1e-5, atol=1e-5)
