"""Tiny random instances of the classes of the optional transformers library."""

from pathlib import Path

import torch

CONFIGS = {
    "albert": {
        "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48,
        "vocab_size": 40, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "inner_group_num": 2,
    },
    "dory": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "max_position_embeddings": 64, "sliding_window": 32,
        "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3, "pad_token_id": None,
    },
    "hrm_text": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "vocab_size": 40, "max_position_embeddings": 64, "H_cycles": 2, "L_cycles": 3, "prefix_lm": True,
    },
    "inkling2_loop_text": {
        "vocab_size": 48, "unpadded_vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
        "swa_head_dim": 8, "sliding_window_size": 32, "d_rel": 4, "rel_extent": 32, "moe_intermediate_size": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_layers_per_attn_res_block": 2, "loop_layer_index_start": 2,
        "loop_layer_index_end": 6, "loop_num_passes": 3, "loop_gate_rank": 8, "max_position_embeddings": 64,
    },
}  # fmt: skip
CLASSES = {
    "albert": "AlbertForMaskedLM",
    "dory": "DoryForCausalLM",
    "hrm_text": "HrmTextForCausalLM",
    "inkling2_loop_text": "Inkling2LoopForCausalLM",
}


def library_model(name: str, seed: int = 0):
    """A tiny instance with weights large enough that every part of it matters."""
    import transformers

    torch.manual_seed(seed)
    cls = getattr(transformers, CLASSES[name])
    model = cls(cls.config_class(**CONFIGS[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * parameter.abs().mean() * torch.randn(parameter.shape))
    return model


def save(name: str, folder: Path) -> Path:
    """Writes a tiny checkpoint as the library does."""
    library_model(name).save_pretrained(folder)
    return folder
