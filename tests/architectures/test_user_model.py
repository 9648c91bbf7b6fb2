"""Models of the user's own: a class in a file, an entry point, a class that ships with a checkpoint."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halting_bench.architectures.load import load_model
from halting_bench.architectures.user_model import build_user_model
from halting_bench.doctor import believable, examine
from halting_bench.errors import UserError
from halting_bench.plugins import class_in_file
from halting_bench.sources import find_model_source

EXAMPLE = Path(__file__).parents[2] / "docs" / "my_model.py"
TOKENS = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))


def test_the_documented_example_passes_every_self_check():
    source = find_model_source(f"{EXAMPLE}@MyLoopedModel")
    checks = examine(source.load(dtype=torch.float64), reload=lambda dtype: source.load(dtype=dtype))
    assert believable(checks), [check for check in checks if check.verdict == "fail"]
    assert source.manifest() == {
        "model": "MyLoopedModel", "revision": None, "class": f"{EXAMPLE}@MyLoopedModel", "trust_remote_code": False,
    }  # fmt: skip


def test_the_documented_example_is_forty_lines():
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def test_costs_that_a_class_does_not_state_are_counted():
    model = build_user_model(f"{EXAMPLE}@MyLoopedModel", dtype=torch.float32, device="cpu")
    step = model.costs()["step/0"]
    assert step.fixed == 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128)
    assert step.per_context == 4 * 32


def test_the_hash_follows_the_source(tmp_path):
    copy = tmp_path / "model.py"
    copy.write_text(EXAMPLE.read_text())
    before = find_model_source(f"{copy}@MyLoopedModel").hash()
    assert before == find_model_source(f"{EXAMPLE}@MyLoopedModel").hash()
    copy.write_text(EXAMPLE.read_text().replace("std=0.2", "std=0.3"))
    assert find_model_source(f"{copy}@MyLoopedModel").hash() != before


BASE = "from halting_bench.architectures.base import RecurrentModel"
BODY = f"""
{BASE}
class A(RecurrentModel):
    def embed(self, tokens, context): ...
    def begin(self, loop, x, noise): ...
    def step(self, loop, state, x, context): ...
    def end(self, loop, state, context): ...
    def readout(self, x, context): ...
"""
RAISES = "    def __init__(self): raise ValueError('no weights')"
WRONG = {
    "no such file": ("missing.py@A", "", "no such file"),
    "no such class": ("m.py@Lopped", "class Looped: pass", "did you mean 'Looped'"),
    "not a model": ("m.py@Looped", "class Looped: pass", "not a RecurrentModel"),
    "does not import": ("m.py@A", "raise OSError('no disk')", "cannot be imported: OSError: no disk"),
    "methods missing": ("m.py@A", f"{BASE}\nclass A(RecurrentModel): ...", "lacks begin, embed"),
    "imported, not written": ("m.py@RecurrentModel", BASE, "unknown class"),
    "no spec": ("m.py@A", BODY, "sets no spec"),
    "constructor raises": ("m.py@A", BODY + RAISES, "raised ValueError: no weights"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_class_that_does_not_work_is_one_clear_line(case, tmp_path):
    target, body, message = WRONG[case]
    (tmp_path / "m.py").write_text(body)
    with pytest.raises(UserError, match=message) as caught:
        build_user_model(str(tmp_path / target), dtype=torch.float32, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package on the path that offers the example as a plug-in."""
    (tmp_path / "looped_package.py").write_text(EXAMPLE.read_text())
    info = tmp_path / "looped_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: looped-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[halting_bench.models]\nmy-model = looped_package:MyLoopedModel\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("looped_package", None)


def test_an_installed_package_offers_a_model_by_name(installed):
    assert find_model_source("my-model").load().spec.family == "mine"
    with pytest.raises(UserError, match="did you mean 'my-model'"):
        find_model_source("my-modl")


@pytest.fixture
def shipped(tmp_path):
    """A checkpoint that brings its own class."""
    code = EXAMPLE.read_text().replace("def __init__(self, width: int = 32", "def __init__(self, config, width: int = 32")
    (tmp_path / "looped.py").write_text(code)
    model = class_in_file(str(tmp_path / "looped.py"), "MyLoopedModel")({})
    with torch.no_grad():
        model.head.bias.fill_(3.0)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    config = {"model_type": "mine", "auto_map": {"HaltingBenchModel": "looped.MyLoopedModel"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, model


def test_shipped_code_runs_only_when_told_to_and_is_written_down(shipped):
    folder, model = shipped
    with pytest.raises(UserError, match="--trust-remote-code"):
        load_model(folder)
    source = find_model_source(str(folder), trust_remote_code=True)
    assert torch.equal(source.load()(TOKENS, 3), model.eval()(TOKENS, 3))
    assert source.manifest()["trust_remote_code"] is True


def test_shipped_code_outside_the_folder_is_refused(shipped):
    folder, _ = shipped
    (folder / "looped.py").rename(folder.parent / "looped.py")
    (folder / "looped.py").symlink_to(folder.parent / "looped.py")
    with pytest.raises(UserError, match="link out of its folder"):
        load_model(folder, trust_remote_code=True)
