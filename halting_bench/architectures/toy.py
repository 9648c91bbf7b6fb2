"""Seeded toy models: real families with random weights, small enough for tests and for trying out a policy.

Their weights are scaled so that a state keeps moving without exploding; nothing is learned, so no figure of theirs means
anything but that the machinery works.
"""

import json
from pathlib import Path

import torch

from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.config import Config
from halting_bench.architectures.load import FAMILIES
from halting_bench.errors import unknown_name

TOYS: dict[str, Config] = {
    "huginn": {
        "model_type": "huginn_raven", "n_embd": 16, "n_heads": 2, "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 1,
        "n_layers_in_coda": 1, "intermediate_size": 24, "block_size": 256, "padded_vocab_size": 256, "mean_recurrence": 4,
        "norm_eps": 1e-6, "rope_base": 1000, "qk_bias": True,
    },
    "ouro": {
        "model_type": "ouro", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
        "vocab_size": 256, "rms_norm_eps": 1e-6, "total_ut_steps": 6, "rope_theta": 1000.0, "max_position_embeddings": 256,
        "hidden_act": "silu", "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Name -> public config.json."""


def toy_model(name: str = "huginn", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> RecurrentModel:
    """A toy on the CPU: the same weights for the same seed, drawn in float64 whatever the dtype.

    Raises:
        UserError: no toy of that name.
    """
    if name not in TOYS:
        raise unknown_name("toy model", name, TOYS)
    model = FAMILIES[str(TOYS[name]["model_type"])].build(dict(TOYS[name]), ())
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        matrix = parameter.dim() > 1
        parameter.data = (drawn * parameter.shape[-1] ** -0.5 if matrix else 1 + 0.2 * drawn).to(dtype)
    return model.eval().requires_grad_(False)


def write_toy(folder: Path, name: str = "huginn", *, seed: int = 0) -> Path:
    """Writes a toy as a checkpoint that `load_model` and a sweep take. Returns the folder."""
    from safetensors.torch import save_model

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TOYS[name]), encoding="utf-8")
    save_model(toy_model(name, seed=seed), str(folder / "model.safetensors"))
    return folder
