"""How a run's weights begin, and how they leave it."""

import json
import math
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from halting_bench.architectures.base import RecurrentModel
from halting_bench.training.recipe import Recipe


def initialise(model: RecurrentModel, seed: int) -> None:
    """Seeded weights: matrices N(0, 2 / 5D) cut at 3 sigma, those that write to the residual stream scaled down by depth.

    A halting head begins at odds of one to the mean depth, so that the first exits are not all at the first steps.
    """
    generator = torch.Generator().manual_seed(seed)
    spec = model.spec
    std = math.sqrt(2 / (5 * spec.width))
    depth = spec.layers + sum(loop.layers for loop in spec.loops) * (spec.mean_recurrence - 1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "lm_head" not in name:
            scale = std / math.sqrt(2 * depth) if name.endswith("proj.weight") else std
            nn.init.trunc_normal_(parameter, std=scale, a=-3 * scale, b=3 * scale, generator=generator)
        if name == "halting_head.bias":
            nn.init.constant_(parameter, -math.log(spec.mean_recurrence))


def export(model: RecurrentModel, recipe: Recipe, out: Path) -> Path:
    """Writes config.json and model.safetensors in the public layout: public keys and names, a tied head left out."""
    config = recipe.config | {"model_type": recipe.family, "tokenizer": "bytes", "torch_dtype": recipe.export}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    dtype = getattr(torch, recipe.export)
    tied = recipe.config.get("tie_embeddings", True)
    tensors = {
        name: parameter.detach().to("cpu", dtype).contiguous()
        for name, parameter in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    partial = out / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, out / "model.safetensors")
    return out / "model.safetensors"
