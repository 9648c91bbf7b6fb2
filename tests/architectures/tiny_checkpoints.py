"""Tiny checkpoints of every native family, written to disk with random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from halting_bench.architectures.huginn import Huginn
from halting_bench.architectures.load import FAMILIES

HUGINN = {
    "model_type": "huginn_raven", "n_embd": 32, "n_heads": 4, "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 1, "intermediate_size": 48, "block_size": 64, "vocab_size": 40, "padded_vocab_size": 40,
    "mean_recurrence": 6, "norm_eps": 1e-6, "rope_base": 50000, "qk_bias": True, "tie_embeddings": True,
    "injection_type": "linear", "state_init": "like-init",
}  # fmt: skip
RETROFIT = {
    **HUGINN, "num_key_value_heads": 2, "qk_bias": False, "tie_embeddings": False, "rope_theta": 500000.0,
    "init_values": {"std": 0.1, "embed_scale": 1.0}, "max_position_embeddings": 64,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 16},
}  # fmt: skip
OURO = {
    "model_type": "ouro", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 40, "rms_norm_eps": 1e-6, "total_ut_steps": 4, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
NANBEIGE = {
    "model_type": "nanbeige", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 48, "vocab_size": 40, "rms_norm_eps": 1e-6, "num_loops": 2, "rope_theta": 7e7,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "skip_loop_final_norm": False, "loop_share_kv": False,
}  # fmt: skip

CONFIGS: dict[str, tuple[dict, str]] = {
    "huginn": (HUGINN, "sandwich"),
    "huginn-halting-head": ({**HUGINN, "halting_head": True}, "sandwich"),
    "retrofitted-llama": (RETROFIT, "pre-norm"),
    "retrofitted-olmo": ({**RETROFIT, "rope_scaling": None}, "post-norm"),
    "embed-init": ({**RETROFIT, "initial_state_mode": "embed-init"}, "pre-norm"),
    "skip-adapter": ({**RETROFIT, "initial_state_mode": "skip-adapter"}, "post-norm"),
    "ouro": (OURO, ""),
    "nanbeige": (NANBEIGE, ""),
    "nanbeige-norm-at-end": ({**NANBEIGE, "skip_loop_final_norm": True, "tie_word_embeddings": True}, ""),
}
"""Name -> (config, Huginn block)."""


def random_weights(config: dict, block: str = "", seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 tensors of a tiny model by their public names; scaled so that a few loops neither die nor explode."""
    model = Huginn(config, block) if block else FAMILIES[config["model_type"]](config)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.2) + (p.dim() == 1)
        for name, p in model.named_parameters()
    }


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """A checkpoint folder: config.json and one weight file, or shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = sorted(tensors)[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def tiny(folder: Path, name: str, shards: int = 1) -> Path:
    """Writes the tiny checkpoint of that name."""
    config, block = CONFIGS[name]
    return write(folder, config, random_weights(config, block), shards)
