"""Layouts against an independent model: a retrofitted checkpoint whose adapter passes its input is its parent."""

import pytest
import torch
from tiny_checkpoints import CONFIGS, NANBEIGE, RETROFIT, random_weights, tiny, write

from halting_bench.architectures.load import load_model
from halting_bench.errors import UserError

TOKENS = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(1))


def parent_weights(tensors: dict, layer: str, source: str, qk_norm: bool) -> dict:
    """Tensors of one parent layer, from those of a retrofitted one."""
    q, k, v = tensors[f"{source}.attn.Wqkv.weight"].split((32, 16, 16))
    gate, up = tensors[f"{source}.mlp.fc.weight"].chunk(2)
    norms = (
        ("post_attention_layernorm", "post_feedforward_layernorm")
        if qk_norm
        else ("input_layernorm", "post_attention_layernorm")
    )
    named = {
        "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
        "self_attn.o_proj": tensors[f"{source}.attn.proj.weight"], "mlp.gate_proj": gate, "mlp.up_proj": up,
        "mlp.down_proj": tensors[f"{source}.mlp.proj.weight"],
        norms[0]: tensors[f"{source}.norm_1.weight"], norms[1]: tensors[f"{source}.norm_2.weight"],
    }  # fmt: skip
    if qk_norm:
        named |= {f"self_attn.{x}_norm": tensors[f"{source}.attn.{x}_norm.weight"] for x in "qk"}
    return {f"{layer}.{name}.weight": value for name, value in named.items()}


@pytest.mark.parametrize(("name", "parent"), [("retrofitted-llama", "Llama"), ("retrofitted-olmo", "Olmo2")])
def test_one_loop_of_a_retrofitted_model_is_its_parent(name, parent, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the parents' classes come from the optional extra")
    config, block = CONFIGS[name]
    tensors = random_weights(config, block)
    tensors["transformer.adapter.weight"] = torch.cat((torch.zeros(32, 32), torch.eye(32)), dim=1)
    model = load_model(write(tmp_path, config, tensors))
    rope = {"rope_theta": config["rope_theta"], "rope_type": "default", **(config["rope_scaling"] or {})}
    library_config = getattr(transformers, f"{parent}Config")(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, vocab_size=40,
        rms_norm_eps=1e-6, max_position_embeddings=64, rope_parameters=rope, tie_word_embeddings=False, pad_token_id=None,
    )  # fmt: skip
    library = getattr(transformers, f"{parent}ForCausalLM")(library_config).eval()
    stages = ["prelude.0", "core_block.0", "core_block.1", "coda.0"]
    weights = {
        "model.embed_tokens.weight": tensors["transformer.wte.weight"],
        "model.norm.weight": tensors["transformer.ln_f.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }
    for number, stage in enumerate(stages):
        weights |= parent_weights(tensors, f"model.layers.{number}", f"transformer.{stage}", block == "post-norm")
    library.load_state_dict(weights)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS, 1), library(TOKENS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loops", [1, 2])
def test_nanbeige_is_llama_s_stack_run_again_with_a_norm_between(loops, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the parent's class comes from the optional extra")
    tensors = random_weights(NANBEIGE)
    model = load_model(write(tmp_path, NANBEIGE, tensors))
    library = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=48,
            vocab_size=40,
            rms_norm_eps=1e-6,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            pad_token_id=None,
            rope_parameters={"rope_theta": 7e7, "rope_type": "default"},
        )
    ).eval()
    library.load_state_dict(tensors)
    with torch.no_grad():
        hidden = library.model.embed_tokens(TOKENS)
        for _ in range(loops):
            hidden = library.model(inputs_embeds=hidden).last_hidden_state
        torch.testing.assert_close(model(TOKENS, loops), library.lm_head(hidden), rtol=1e-5, atol=1e-5)


def test_nanbeige_without_the_norm_between_has_it_before_the_head(tmp_path):
    model = load_model(tiny(tmp_path, "nanbeige-norm-at-end"))
    normed = load_model(
        write(tmp_path / "b", {**NANBEIGE, "tie_word_embeddings": True}, random_weights(CONFIGS["nanbeige-norm-at-end"][0]))
    )
    assert torch.equal(model(TOKENS, 1), normed(TOKENS, 1))
    assert not torch.allclose(model(TOKENS, 2), normed(TOKENS, 2))


def test_embed_init_starts_from_the_embedded_input(tmp_path):
    model = load_model(tiny(tmp_path, "embed-init"))
    x = torch.randn(2, 3, 32)
    assert torch.equal(model.begin(0, x, torch.randn(2, 3, 32)), x)
    assert not model.spec.loops[0].random_start


def test_skip_adapter_skips_it_in_the_first_step_of_each_row_only(tmp_path):
    config, block = CONFIGS["skip-adapter"]
    tensors = random_weights(config, block)
    model = load_model(write(tmp_path / "a", config, tensors))
    passing = {**tensors, "transformer.adapter.weight": torch.cat((torch.zeros(32, 32), torch.eye(32)), dim=1)}
    first_only = load_model(write(tmp_path / "b", {**config, "initial_state_mode": "embed-init"}, passing))
    always = load_model(write(tmp_path / "c", {**config, "initial_state_mode": "embed-init"}, tensors))
    torch.testing.assert_close(model(TOKENS, 1), first_only(TOKENS, 1))
    assert not torch.allclose(model(TOKENS, 1), always(TOKENS, 1))
    assert not torch.allclose(model(TOKENS, 2), first_only(TOKENS, 2))


def test_a_drawn_start_has_the_config_s_scale(tmp_path):
    model = load_model(tiny(tmp_path, "retrofitted-llama"))
    noise = torch.ones(1, 1, 32)
    assert torch.allclose(model.begin(0, noise, noise), torch.full_like(noise, 0.1))


def test_an_unknown_start_mode_is_refused(tmp_path):
    config = {**RETROFIT, "initial_state_mode": "warm"}
    with pytest.raises(UserError, match=r"initial_state_mode is 'warm'.*'random', 'embed-init', 'skip-adapter'"):
        load_model(write(tmp_path, config, random_weights(RETROFIT, "pre-norm")))
