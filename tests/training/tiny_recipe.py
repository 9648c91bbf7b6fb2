"""A recipe so small that it trains in a second."""

CONFIG = {
    "n_embd": 16, "n_heads": 2, "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 1, "n_layers_in_coda": 1,
    "intermediate_size": 16, "block_size": 128, "padded_vocab_size": 256, "mean_recurrence": 3, "norm_eps": 1e-6,
    "rope_base": 1000,
}  # fmt: skip
TINY = {"name": "tiny", "summary": "A test.", "config": CONFIG, "steps": 4, "mixture": [{"task": "shell"}]}
