"""SELF-Transformer encoders: attention iterated to its fixed point, layer by layer."""

import itertools
import json

import pytest
import torch
from safetensors.torch import save_file

from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.flops import count_stages
from halting_bench.architectures.load import load_model
from halting_bench.architectures.self_transformer import SelfTransformer
from halting_bench.errors import UserError

CONFIG = {
    "model_type": "self_transformer", "vocab_size": 24, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 32, "max_position_embeddings": 32, "mean_recurrence": 6, "damping": 0.5, "norm_eps": 1e-6,
    "rope_theta": 1000.0,
}  # fmt: skip
TOKENS = torch.randint(0, 24, (3, 9), generator=torch.Generator().manual_seed(0))


def tiny(**changes: object) -> SelfTransformer:
    torch.manual_seed(0)
    model = SelfTransformer(CONFIG | changes).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.2)
    return model


def test_an_iteration_is_the_equation_written_out() -> None:
    model = tiny(num_hidden_layers=1, num_attention_heads=1)
    layer, context = model.encoder["layers"][0], DenseContext(TOKENS.shape[1], causal=False)
    x = model.encoder["wte"](TOKENS) * 4.0
    u = torch.zeros_like(x)
    cos, sin = model.angles.at(context.positions, x)

    def rotated(y: torch.Tensor) -> torch.Tensor:
        a, b = y[..., None, :].chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)[..., 0, :]

    for _ in range(4):
        q, k = layer.query_key(layer.norm_state(x + u)).chunk(2, dim=-1)
        attention = (rotated(q) @ rotated(k).transpose(-1, -2) / 4.0).softmax(-1)
        u = 0.5 * u + 0.5 * layer.proj(attention @ layer.value(layer.norm_input(x)))
    y = x + u
    y = y + layer.mlp(layer.norm_mlp(y))
    torch.testing.assert_close(model(TOKENS, 4), model.lm_head(model.encoder["ln_f"](y)), rtol=0, atol=1e-12)


def test_undamped_and_once_it_is_an_ordinary_encoder_layer() -> None:
    model = tiny(num_hidden_layers=1, damping=1.0)
    layer, context = model.encoder["layers"][0], DenseContext(TOKENS.shape[1], causal=False)
    x = model.embed(TOKENS, context)
    once = model.step(0, model.begin(0, x, None), x, context)
    again = model.step(0, x, x, context)
    assert torch.equal(once, again)
    mixed = once - x
    q, k, v = layer.norm_state(x), layer.norm_state(x), layer.norm_input(x)
    q, k = (layer.query_key(q).chunk(2, -1)[0], layer.query_key(k).chunk(2, -1)[1])
    cos, sin = model.angles.at(context.positions, x)

    def heads(y: torch.Tensor) -> torch.Tensor:
        y = y.unflatten(-1, (2, 8))
        a, b = y.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).transpose(1, 2)

    weights = (heads(q) @ heads(k).transpose(-1, -2) / 8**0.5).softmax(-1)
    plain = (weights @ layer.value(v).unflatten(-1, (2, 8)).transpose(1, 2)).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(mixed, layer.proj(plain), rtol=0, atol=1e-12)


def test_with_weak_attention_the_iteration_contracts_to_a_fixed_point() -> None:
    model = tiny()
    for layer in model.encoder["layers"]:
        layer.query_key.weight.mul_(0.2)
    context = DenseContext(TOKENS.shape[1], causal=False)
    x = model.embed(TOKENS, context)
    state = model.begin(0, x, None)
    steps = []
    for _ in range(40):
        after = model.step(0, state, x, context)
        steps.append(float((after - state).norm() / after.norm()))
        state = after
    assert steps[-1] < 1e-9 < steps[0]
    assert all(after < before for before, after in itertools.pairwise(steps))


def test_an_encoder_reads_both_directions_and_not_its_batch_nor_its_padding() -> None:
    model = tiny()
    base = model(TOKENS, 3)
    torch.testing.assert_close(model(TOKENS[1:2], 3), base[1:2], rtol=0, atol=1e-12)
    changed = TOKENS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 24
    assert (model(changed, 3)[:, 0] - base[:, 0]).abs().max() > 1e-4
    context = DenseContext(TOKENS.shape[1], causal=False, lengths=torch.tensor([9, 6, 4]))
    x = model.embed(TOKENS, context)
    for loop in range(2):
        state = model.begin(loop, x, None)
        for _ in range(3):
            state = model.step(loop, state, x, context)
        x = model.end(loop, state, context)
    padded = model.readout(x, context)
    torch.testing.assert_close(padded[1, :6], model(TOKENS[1:2, :6], 3)[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(padded[2, :4], model(TOKENS[2:3, :4], 3)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, {"token_base": 5, "tie_embeddings": False}])
def test_the_stated_cost_is_what_a_counter_sees(changes: dict) -> None:
    model = tiny(**changes)
    counted = count_stages(model, 6)
    assert {stage: flops.at(6) for stage, flops in model.costs().items()} == pytest.approx(counted)


def test_a_saved_model_loads_from_its_folder(tmp_path) -> None:
    model = tiny()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path, dtype=torch.float64)
    assert torch.equal(loaded(TOKENS, 2), model(TOKENS, 2))


def test_a_token_may_stand_for_a_pair() -> None:
    model = tiny(token_base=5, tie_embeddings=False)
    context = DenseContext(TOKENS.shape[1], causal=False)
    table = model.encoder["wte"].weight
    assert table.shape == (5, 16)
    expected = 4.0 * (table[TOKENS // 5] + table[TOKENS % 5] @ model.encoder["second"].weight.T)
    torch.testing.assert_close(model.embed(TOKENS, context), expected, rtol=0, atol=1e-12)
    assert model(TOKENS, 2).shape == (3, 9, 24)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_base": 5}, "set tie_embeddings to false"),
        ({"token_base": 4, "tie_embeddings": False}, "4 things make 16 pairs, but vocab_size is 24"),
        ({"damping": 1.5}, "damping is 1.5"),
        ({"damping": 0}, "damping is 0"),
        ({"num_attention_heads": 3}, "3 heads do not share a width of 16 evenly"),
        ({"num_hidden_layers": 10**9}, "more than 10000 layers are refused"),
        ({"mean_recurrence": None}, "lacks mean_recurrence"),
    ],
)
def test_a_config_that_cannot_be_is_refused_in_one_line(changes: dict, said: str) -> None:
    with pytest.raises(UserError) as raised:
        SelfTransformer(CONFIG | changes)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
