"""Loading checkpoints, whole and broken."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CONFIGS, HUGINN, OURO, random_weights, tiny, write

from halting_bench.architectures.load import load_model
from halting_bench.errors import UserError

TOKENS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_equal_a_single_file(name, tmp_path):
    whole = load_model(tiny(tmp_path / "whole", name))
    parts = load_model(tiny(tmp_path / "parts", name, shards=3))
    assert torch.equal(whole(TOKENS, 2), parts(TOKENS, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_come_in_the_dtype_asked_for_whatever_the_file_has(dtype, tmp_path):
    model = load_model(tiny(tmp_path, "ouro"), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training


def test_a_large_tensor_is_read_in_windows_and_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("halting_bench.architectures.weights.WINDOW_BYTES", 1000)
    tensors = random_weights(OURO)
    model = load_model(write(tmp_path, OURO, tensors))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[name]), name


def test_tied_embeddings_share_memory_and_may_be_stored_once_or_twice(tmp_path):
    tensors = random_weights(HUGINN, "sandwich")
    for folder, extra in (("once", {}), ("twice", {"lm_head.weight": tensors["transformer.wte.weight"].clone()})):
        model = load_model(write(tmp_path / folder, HUGINN, {**tensors, **extra}))
        assert model.lm_head.weight.data_ptr() == model.transformer["wte"].weight.data_ptr()
    only_head = {n: t for n, t in tensors.items() if n != "transformer.wte.weight"}
    model = load_model(write(tmp_path / "head", HUGINN, {**only_head, "lm_head.weight": tensors["transformer.wte.weight"]}))
    assert torch.equal(model.transformer["wte"].weight, tensors["transformer.wte.weight"])


def test_rotary_tables_that_a_checkpoint_holds_are_computed_anew(tmp_path):
    """Huginn-0125 stores freqs_cis, older exports of Llama models an inv_freq a layer."""
    tensors = random_weights(HUGINN, "sandwich")
    tables = {"freqs_cis": torch.zeros(1, 64, 1, 4, 2), "transformer.prelude.0.rotary_emb.inv_freq": torch.zeros(4)}
    plain, tabled = (load_model(write(tmp_path / n, HUGINN, t)) for n, t in (("a", tensors), ("b", tensors | tables)))
    assert torch.equal(plain(TOKENS, 2), tabled(TOKENS, 2))


def broken(tmp_path, mend, config=OURO, shards=1):
    """A good checkpoint that `mend` then breaks; returns its folder."""
    folder = write(tmp_path / "model", config, random_weights(config), shards)
    mend(folder)
    return folder


def edit_config(**changes):
    def mend(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return mend


def edit_tensors(change):
    def mend(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return mend


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def link_out(name):
    def mend(folder):
        os.rename(folder / name, folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)

    return mend


def to_int(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


BROKEN = {
    "truncated": (truncate, "truncated or not a safetensors file"),
    "not safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 500), "truncated or not a safetensors"),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), r"empty \(0 bytes\)"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors in"),
    "pickled weights": (pickled, "only pickled weights .* never opened"),
    "link of weights": (link_out("model.safetensors"), "link out of its folder"),
    "link of config": (link_out("config.json"), "link out of its folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "config not an object": (lambda f: (f / "config.json").write_text("[1]"), "holds a list"),
    "unknown family": (edit_config(model_type="oura"), "did you mean 'ouro'.*known: .*huginn_raven.*ouro"),
    "no family": (edit_config(model_type=None), "known: .*huginn_raven"),
    "key missing": (edit_config(hidden_size=None), "lacks hidden_size"),
    "size of wrong type": (edit_config(hidden_size="32"), "hidden_size is '32': it must be a whole number"),
    "size negative": (edit_config(vocab_size=-1), "vocab_size is -1"),
    "eps zero": (edit_config(rms_norm_eps=0), "rms_norm_eps is 0: it must be a positive number"),
    "10^9 loops": (edit_config(total_ut_steps=10**9), "1000000000 loops: more than 10000 are refused"),
    "10^9 layers": (edit_config(num_hidden_layers=10**9), "1000000000: more than 10000 layers are refused"),
    "sizes that overflow": (edit_config(hidden_size=2**40, vocab_size=2**40), "impossible model"),
    "fewer layers than tensors": (edit_config(num_hidden_layers=1), "has unknown 11"),
    "more layers than tensors": (edit_config(num_hidden_layers=3), "lacks 11"),
    "other width": (edit_config(intermediate_size=64), r"is \[.*48.*\], config.json says \[.*64.*\]"),
    "unsupported activation": (edit_config(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "unsupported rope": (edit_config(rope_scaling={"rope_type": "yarn", "factor": 2.0}), "rope scaling 'yarn'"),
    "heads that do not divide": (edit_config(num_key_value_heads=3), "do not share 3"),
    "tied but different": (edit_config(tie_word_embeddings=True), "differ, but config.json ties them"),
    "missing tensor": (edit_tensors(lambda t: t.pop("model.norm.weight")), r"lacks 1 \(model.norm.weight\)"),
    "integer weights": (edit_tensors(to_int), "dtype I8: only"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_one_clear_line(case, tmp_path):
    mend, message = BROKEN[case]
    with pytest.raises(UserError, match=message) as caught:
        load_model(broken(tmp_path, mend))
    assert "\n" not in str(caught.value)


def edit_index(change):
    def mend(folder):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return mend


SHARD = "model-00002-of-00003.safetensors"
BROKEN_SHARDS = {
    "shard missing": (lambda f: (f / SHARD).unlink(), f"no {SHARD}"),
    "shard empty": (lambda f: (f / SHARD).write_bytes(b""), "empty"),
    "shard truncated": (lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-8]), "truncated"),
    "shard a link out": (link_out(SHARD), "link out of its folder"),
    "index names an absent file": (
        edit_index(lambda m: m.update({"lm_head.weight": "model-9.safetensors"})),
        "no model-9.safetensors",
    ),
    "index climbs out": (edit_index(lambda m: m.update({"lm_head.weight": "../model.safetensors"})), "not a plain file name"),
    "index names an absent tensor": (edit_index(lambda m: m.update(ghost=SHARD)), "ghost is named by the index but absent"),
    "index lacks a tensor": (edit_index(lambda m: m.pop("model.norm.weight")), "not named by the index"),
    "index empty": (edit_index(lambda m: m.clear()), "no weight_map"),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), "but no model.safetensors.index.json"),
}


@pytest.mark.parametrize("case", BROKEN_SHARDS)
def test_broken_shards_are_one_clear_line(case, tmp_path):
    mend, message = BROKEN_SHARDS[case]
    with pytest.raises(UserError, match=message) as caught:
        load_model(broken(tmp_path, mend, shards=3))
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="no model folder"):
        load_model(tmp_path / "nowhere")


def test_links_of_the_hub_cache_are_followed(tmp_path):
    plain = tiny(tmp_path / "plain", "ouro")
    repository = tmp_path / "models--someone--loop"
    snapshot = repository / "snapshots" / "abc"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(plain.iterdir()):
        file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert load_model(snapshot).spec.family == "ouro"
