"""The self-checks: a sound model passes every one, and each kind of unsound model fails the check that is meant for it."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from halting_bench.architectures.base import Flops, LoopSpec, ModelSpec, RecurrentModel
from halting_bench.architectures.load import load_model
from halting_bench.doctor import Check, believable, examine, examine_source
from halting_bench.errors import UserError
from halting_bench.reporting.checks import print_checks
from halting_bench.sources import find_model_source

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", ["huginn", "ouro"])
def test_a_sound_model_passes_everything_in_every_dtype(family):
    source = find_model_source(str(GOLDEN / family))
    for dtype in ("float64", "bfloat16"):
        checks = examine_source(source, dtype=dtype, device="cpu")
        assert believable(checks), [check for check in checks if check.verdict == "fail"]
        assert {"pass", "info"} == {check.verdict for check in checks}


def test_the_quick_part_is_a_part():
    source = find_model_source(str(GOLDEN / "ouro"))
    quick = {check.name for check in examine_source(source, dtype="float32", device="cpu", quick=True)}
    full = {check.name for check in examine_source(source, dtype="float32", device="cpu")}
    assert quick < full


class Sound(RecurrentModel):
    """The smallest causal looped model: each unsound one below changes one thing."""

    def __init__(self, **spec):
        super().__init__()
        fields = {"mean_recurrence": 3, "loops": (LoopSpec("core", 1, random_start=True),), **spec}
        self.spec = ModelSpec(
            "tiny", width=8, vocab_size=256, max_length=64, layers=1, heads=2, kv_heads=2, head_width=4, **fields
        )
        torch.manual_seed(0)
        self.table, self.places, self.head = nn.Embedding(256, 8), nn.Embedding(64, 8), nn.Linear(8, 256, bias=False)
        self.mix, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)
        self.double().eval().requires_grad_(False)

    def embed(self, tokens, context):
        return self.table(tokens) + self.places(context.positions)

    def begin(self, loop, x, noise):
        return torch.zeros_like(x) if noise is None else noise.to(x)

    def step(self, loop, state, x, context):
        q, k, v = (part.unflatten(-1, (2, 4)) for part in self.mix(self.norm(state + x)).chunk(3, dim=-1))
        return self.norm(state + x + context.attend(0, q, k, v).flatten(-2))

    def end(self, loop, state, context):
        return state

    def readout(self, x, context):
        return self.head(x)


def test_a_weight_that_is_not_a_number_is_told_where_the_attention_kernel_hides_it():
    model = Sound()
    model.mix.weight[0] = math.nan  # a query: the fused kernel gives zeros for scores that are not numbers
    check = next(check for check in examine(model, quick=True) if check.name == "finite at every depth")
    assert (check.verdict, check.figure) == ("fail", 1) and "mix.weight" in check.note


@pytest.mark.parametrize("device", ["auto", "cuda:0,cuda:1", '{"": 0}'])
def test_a_device_map_is_refused(device):
    with pytest.raises(UserError, match=r"unknown device .* known: cpu, cuda"):
        examine_source(find_model_source(str(GOLDEN / "ouro")), dtype="float32", device=device)


class Explodes(Sound):
    def step(self, loop, state, x, context):
        return super().step(loop, state, x, context) / 0.0


class Drops(Sound):
    def step(self, loop, state, x, context):
        return nn.functional.dropout(super().step(loop, state, x, context), 0.5)


class MixesTheBatch(Sound):
    def step(self, loop, state, x, context):
        return super().step(loop, state - state.mean(dim=0, keepdim=True), x, context)


class SeesPadding(Sound):
    def embed(self, tokens, context):
        return super().embed(tokens, context) + self.places.weight[tokens.shape[1]]


class CountsItsOwnPositions(Sound):
    def embed(self, tokens, context):
        return self.table(tokens) + self.places(torch.arange(tokens.shape[-1]))


class UntiedSteps(Sound):
    def __init__(self):
        super().__init__()
        self.other, self.turn = nn.Linear(8, 24).double(), 0

    def step(self, loop, state, x, context):
        self.mix, self.other = self.other, self.mix
        return super().step(loop, state, x, context)


class IgnoresTheNoise(Sound):
    def begin(self, loop, x, noise):
        return torch.ones_like(x)


class Raises(Sound):
    def readout(self, x, context):
        raise RuntimeError("no head")


class DeadGate(Sound):
    def __init__(self):
        super().__init__(has_gate=True)

    def gate(self, state):
        return torch.full(state.shape[:-1], 0.5)


class WrongFlops(Sound):
    def costs(self):
        return {"embed": Flops(0), "step/0": Flops(99), "readout": Flops(4096)}


class FreeSteps(Sound):
    def costs(self):
        return {"embed": Flops(0), "step/0": Flops(0), "readout": Flops(4096)}


UNSOUND = {
    Explodes: "finite at every depth",
    Drops: "same input, same bits",
    MixesTheBatch: "batch = single",
    SeesPadding: "padding is invisible",
    CountsItsOwnPositions: "cached = uncached",
    UntiedSteps: "steps share weights",
    IgnoresTheNoise: "s_0 is seeded",
    DeadGate: "halting gate",
    Raises: "finite at every depth",
    WrongFlops: "FLOPs = counter",
    FreeSteps: "cost grows with depth",
}


def test_the_model_that_the_unsound_ones_change_is_sound():
    assert believable(examine(Sound()))


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("model", UNSOUND, ids=lambda cls: cls.__name__)
def test_an_unsound_model_fails_the_check_that_is_meant_for_it(model, quick):
    checks = examine(model(), quick=quick)
    assert UNSOUND[model] in {check.name for check in checks if check.verdict == "fail"}
    assert not believable(checks)


def test_embeddings_tied_against_the_config_fail():
    model = load_model(GOLDEN / "huginn")
    named = {check.name: check for check in examine(model, {"tie_embeddings": False}, quick=True)}
    assert named["tied embeddings"].verdict == "fail"


def test_policies_that_a_model_leaves_no_room_for_are_named():
    checks = {check.name: check for check in examine(Sound(mean_recurrence=2, fixed_recurrence=True))}
    unfit = checks["policies that do not apply"]
    assert unfit.figure >= 5 and "gate-cdf" in unfit.note and "kl" in unfit.note


def test_kv_bytes_are_those_of_every_loop_and_layer():
    checks = {check.name: check for check in examine(load_model(GOLDEN / "ouro"))}
    assert checks["K/V of a token"].figure == pytest.approx(2 * 4 * 16 * 4 * (3 * 4) / 1e3)
    assert checks["weights"].figure == pytest.approx(sum(p.nbytes for p in load_model(GOLDEN / "ouro").parameters()) / 1e6)


def test_rounding_is_coarser_in_bfloat16_than_in_float32():
    checks = {
        c.name: c.figure for c in examine_source(find_model_source(str(GOLDEN / "huginn")), dtype="float32", device="cpu")
    }
    assert 1e-8 < checks["noise of latent-diff, float32"] < 1e-5 < 1e-3 < checks["noise of latent-diff, bfloat16"] < 0.1


def test_the_table_fits_eighty_columns(capsys):
    checks = examine(Sound(mean_recurrence=2, fixed_recurrence=True))
    print_checks("tiny", checks, Console(file=sys.stdout, width=80, color_system=None))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert all(check.name.split()[0] in printed for check in checks)
    assert "may be believed" in printed


def test_a_check_is_json_able():
    document = json.dumps(Check("x", "info", math.nan, "").as_dict(), allow_nan=False)
    assert json.loads(document) == {"name": "x", "verdict": "info", "figure": None, "unit": "", "limit": None, "note": ""}


@pytest.mark.parametrize(
    ("dtype", "device", "message"), [("float23", "cpu", "did you mean 'float32'"), ("float32", "cuda:9", "cuda:9")]
)
def test_an_impossible_request_is_one_clear_line(dtype, device, message):
    with pytest.raises(UserError, match=message):
        examine_source(find_model_source(str(GOLDEN / "ouro")), dtype=dtype, device=device)
