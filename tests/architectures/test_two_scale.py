"""Two-scale models: three looped groups between plain layers."""

import json

import pytest
import torch
from safetensors.torch import save_file

from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.flops import count_stages
from halting_bench.architectures.load import load_model
from halting_bench.architectures.two_scale import TwoScale
from halting_bench.errors import UserError

CONFIG = {
    "model_type": "two_scale", "vocab_size": 24, "n_embd": 16, "n_head": 2, "n_inner": 32, "n_positions": 32,
    "plain_layers": [2, 1, 0, 1], "loop_layers": [1, 2, 1], "injection": "none", "mean_recurrence": 4, "norm_eps": 1e-6,
    "rope_theta": 1000.0,
}  # fmt: skip
TOKENS = torch.randint(0, 24, (3, 9), generator=torch.Generator().manual_seed(0))


def tiny(**changes: object) -> TwoScale:
    torch.manual_seed(0)
    model = TwoScale(CONFIG | changes).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("injection", ["none", "gate"])
def test_a_depth_per_group_is_the_blocks_written_out(injection: str) -> None:
    model = tiny(injection=injection)
    context = DenseContext(TOKENS.shape[1])
    rotary = model.angles.at(context.positions, model.lm_head.weight)
    plain, looped = model.transformer["plain"], model.transformer["looped"]
    x, layer = model.transformer["wte"](TOKENS) * 4.0, 0
    for group, steps in enumerate((2, 3, 1)):
        for block in plain[group]:
            x, layer = block(x, rotary, layer, context), layer + 1
        state = x
        for _ in range(steps):
            if injection == "gate":
                state = 0.5 * (state + x)  # the gates start at zero, in the middle
            for offset, block in enumerate(looped[group]):
                state = block(state, rotary, layer + offset, context)
        x, layer = state, layer + len(looped[group])
    for block in plain[3]:
        x, layer = block(x, rotary, layer, context), layer + 1
    assert layer == model.spec.layers == 8
    expected = model.lm_head(model.transformer["ln_f"](x))
    torch.testing.assert_close(model(TOKENS, (2, 3, 1)), expected, rtol=0, atol=1e-12)


def test_every_group_changes_the_answer() -> None:
    model = tiny()
    base = model(TOKENS, (2, 2, 2))
    for depths in ((3, 2, 2), (2, 3, 2), (2, 2, 3)):
        assert (model(TOKENS, depths) - base).abs().max() > 1e-3


def test_a_sequence_does_not_depend_on_its_batch_nor_on_what_follows_it() -> None:
    model = tiny(injection="gate")
    together = model(TOKENS, 3)
    torch.testing.assert_close(model(TOKENS[1:2], 3), together[1:2], rtol=0, atol=1e-12)
    torch.testing.assert_close(model(TOKENS[:, :5], 3), together[:, :5], rtol=0, atol=1e-12)


@pytest.mark.parametrize("injection", ["none", "gate"])
def test_the_stated_cost_is_what_a_counter_sees(injection: str) -> None:
    model = tiny(injection=injection)
    counted = count_stages(model, 6)
    assert {stage: flops.at(6) for stage, flops in model.costs().items()} == pytest.approx(counted)


def test_a_saved_model_loads_from_its_folder(tmp_path) -> None:
    model = tiny(injection="gate")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"injection": "gate"}))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path, dtype=torch.float64)
    assert torch.equal(loaded(TOKENS, 2), model(TOKENS, 2))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"plain_layers": [1, 1]}, "plain_layers needs 4 entries, not 2"),
        ({"loop_layers": [0, 1, 1]}, "loop_layers is [0, 1, 1]"),
        ({"plain_layers": "many"}, "plain_layers is 'many'"),
        ({"loop_layers": [10**9, 1, 1]}, "more than 10000 are refused"),
        ({"injection": "sum"}, "injection is 'sum'"),
        ({"n_head": 3}, "3 heads do not share a width of 16 evenly"),
        ({"rope_theta": None}, "lacks rope_theta"),
    ],
)
def test_a_config_that_cannot_be_is_refused_in_one_line(changes: dict, said: str) -> None:
    with pytest.raises(UserError) as raised:
        TwoScale(CONFIG | changes)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_projections_of_an_exit_state_are_undefined_where_the_input_is_mixed_in() -> None:
    context = DenseContext(TOKENS.shape[1])
    plain = tiny()
    state = plain.embed(TOKENS, context)
    assert set(plain.keys_values(1, state, context)) == {4, 5}
    with pytest.raises(UserError, match="propagate"):
        tiny(injection="gate").keys_values(1, state, context)
