"""Families that run through the transformers library: the same numbers as the library's own forward."""

import json

import pytest
import torch
from tiny_library_models import CONFIGS, library_model, save

from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.load import load_model
from halting_bench.errors import UserError

pytest.importorskip("transformers", reason="needs the optional extra: pip install 'halting-bench[transformers]'")

TOKENS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))
DECODERS = [name for name in CONFIGS if name != "albert"]


@pytest.mark.parametrize("name", CONFIGS)
def test_full_depth_is_the_class_s_own_forward(name, tmp_path):
    model = load_model(save(name, tmp_path))
    with torch.no_grad():
        expected = library_model(name)(TOKENS).logits
        actual = model(TOKENS, model.spec.mean_recurrence)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_another_depth_is_another_answer(name, tmp_path):
    model = load_model(save(name, tmp_path))
    with torch.no_grad():
        gap = (model(TOKENS, model.spec.mean_recurrence) - model(TOKENS, model.spec.mean_recurrence - 1)).abs().max()
    assert gap > 1e-3


@pytest.mark.parametrize(
    ("name", "key", "loops"), [("dory", "n_recurrent_loops", 5), ("inkling2_loop_text", "loop_num_passes", 2)]
)
def test_any_depth_is_the_class_with_that_loop_count(name, key, loops, tmp_path):
    model = load_model(save(name, tmp_path))
    library = library_model(name)
    setattr(library.config, key, loops)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS, loops), library(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_albert_s_iterations_are_its_hidden_states(tmp_path):
    model, library = load_model(save("albert", tmp_path)), library_model("albert")
    with torch.no_grad():
        hidden = library(TOKENS, output_hidden_states=True).hidden_states  # one a layer: two an iteration here
        context = DenseContext(12, causal=False)
        x = model.embed(TOKENS, context)
        state = model.begin(0, x, None)
        for k in range(model.spec.mean_recurrence):
            state = model.step(0, state, x, context)
            torch.testing.assert_close(state, hidden[2 * (k + 1)], rtol=1e-5, atol=1e-5)


def test_albert_ignores_padding_as_the_class_does(tmp_path):
    model, library = load_model(save("albert", tmp_path)), library_model("albert")
    lengths = torch.tensor([12, 7])
    context = DenseContext(12, causal=False, lengths=lengths)
    with torch.no_grad():
        x = model.embed(TOKENS, context)
        state = model.begin(0, x, None)
        for _ in range(4):
            state = model.step(0, state, x, context)
        mask = (torch.arange(12) < lengths[:, None]).long()
        expected = library(TOKENS, attention_mask=mask).logits
        torch.testing.assert_close(model.readout(state, context)[1, :7], expected[1, :7], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_at_full_depth_are_those_of_generate(name, tmp_path):
    model, library = load_model(save(name, tmp_path)), library_model(name)
    library.generation_config.pad_token_id = 0
    library.generation_config.eos_token_id = None
    tokens = TOKENS[:1]
    with torch.no_grad():
        expected = library.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
        for _ in range(8):
            best = model(tokens, model.spec.mean_recurrence)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, best), dim=1)
    assert torch.equal(tokens, expected)


def test_tensors_that_do_not_fit_are_one_clear_line(tmp_path):
    folder = save("dory", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(UserError) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_absurd_layer_counts_never_reach_the_library(tmp_path):
    folder = save("dory", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9, "layer_types": None}))
    with pytest.raises(UserError, match="more than 10000 layers"):
        load_model(folder)
