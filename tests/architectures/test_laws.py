"""Laws of the model protocol, over a tiny model of every loader. In float64, where rounding explains nothing."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import CONFIGS, tiny
from tiny_library_models import CONFIGS as LIBRARY_CONFIGS
from tiny_library_models import save

from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.flops import count_stages
from halting_bench.architectures.load import load_model
from halting_bench.architectures.user_model import build_user_model
from halting_bench.probe import Probe, relative_gap

EXAMPLE = Path(__file__).parents[2] / "docs" / "my_model.py"
FLOAT32_INSIDE = 1e-5
"""The library's norms and heads compute in float32 whatever the model's dtype."""


@pytest.fixture(scope="module", params=[*CONFIGS, "example", *LIBRARY_CONFIGS])
def probe(request, tmp_path_factory):
    """(probe, tolerance) of one loader's model, in float64."""
    name, folder = request.param, tmp_path_factory.mktemp("model")
    torch.set_num_threads(1)
    if name in LIBRARY_CONFIGS:
        pytest.importorskip("transformers", reason="needs the optional extra: pip install 'halting-bench[transformers]'")
        dtype = torch.float32 if name.startswith("inkling") else torch.float64
        return Probe(load_model(save(name, folder), dtype=dtype), tokens=7), FLOAT32_INSIDE
    if name == "example":
        return Probe(build_user_model(f"{EXAMPLE}@MyLoopedModel", dtype=torch.float64, device="cpu"), tokens=7), 1e-10
    return Probe(load_model(tiny(folder, name), dtype=torch.float64), tokens=7), 1e-10


@torch.no_grad()
def test_stepping_by_hand_is_the_plain_forward_at_every_depth(probe):
    probe, _ = probe
    for depth, (_, logits) in enumerate(probe.dense(), start=1):
        assert torch.equal(probe.model(probe.tokens, depth, probe.noise), logits)


@torch.no_grad()
def test_every_depth_gives_another_answer(probe):
    probe, _ = probe
    pairs = probe.dense()
    for (_, shallow), (_, deep) in pairwise(pairs):
        assert (shallow - deep).abs().max() > 1e-6


@torch.no_grad()
def test_a_sequence_does_not_depend_on_its_batch(probe):
    probe, tolerance = probe
    batch, single = probe.dense(), probe.dense(rows=1)
    assert relative_gap([b[:1] for _, b in batch], [s for _, s in single])[0] <= tolerance


@torch.no_grad()
def test_padding_does_not_change_a_row(probe):
    probe, tolerance = probe
    padded, alone = probe.dense(real=5), probe.dense(length=5)
    assert relative_gap([p[:, :5] for _, p in padded], [a for _, a in alone])[0] <= tolerance


@torch.no_grad()
def test_one_position_at_a_time_over_a_cache_is_the_whole_sequence(probe):
    probe, tolerance = probe
    if not probe.spec.causal or probe.spec.dense_only:
        pytest.skip("rows of this family cannot be cached")
    assert relative_gap(probe.cached(), [logits for _, logits in probe.dense()])[0] <= tolerance


@torch.no_grad()
def test_rows_may_be_packed(probe):
    """[N, D] rows give what [B, T, D] rows give, when the context says who sees whom."""
    probe, tolerance = probe
    if probe.spec.dense_only:
        pytest.skip("rows of this family cannot be packed")
    length = probe.tokens.shape[1]

    class OneSequence(DenseContext):
        def attend(self, layer, q, k, v):
            return super().attend(layer, q[None], k[None], v[None])[0]

    context = OneSequence(length, causal=probe.spec.causal)
    noise = None if probe.noise is None else probe.noise[0]
    packed = [logits for _, logits in probe.run(probe.tokens[0], context, noise)]
    assert relative_gap(packed, [logits[0] for _, logits in probe.dense(rows=1)])[0] <= tolerance


@torch.no_grad()
def test_the_future_is_not_seen(probe):
    probe, tolerance = probe
    if not probe.spec.causal:
        pytest.skip("an encoder sees the whole sequence")
    before = [logits[:, :4] for _, logits in probe.dense()]
    probe.tokens[:, 4:] = (probe.tokens[:, 4:] + 1) % probe.spec.vocab_size
    after = [logits[:, :4] for _, logits in probe.dense()]
    assert relative_gap(after, before)[0] <= tolerance


def test_stated_flops_are_those_of_a_counter(probe):
    probe, _ = probe
    stated, counted = probe.model.costs(), count_stages(probe.model, 24)
    assert set(stated) == set(counted) == {"embed", "readout", *(f"step/{i}" for i in range(len(probe.spec.loops)))}
    for stage, flops in counted.items():
        assert stated[stage].at(24) == pytest.approx(flops, rel=0.02 if probe.spec.dense_only else 1e-9), stage


def test_every_step_costs_something(probe):
    assert all(flops.fixed > 0 for stage, flops in probe[0].model.costs().items() if stage.startswith("step/"))


@torch.no_grad()
def test_steps_share_their_weights(probe):
    first, second = probe[0].weights_by_step()
    assert first and first <= second


def test_a_gate_is_offered_exactly_where_the_spec_says(probe):
    model = probe[0].model
    state = torch.randn(3, model.spec.width, dtype=probe[0].dtype, generator=torch.Generator().manual_seed(0))
    if model.spec.has_gate:
        gate = model.gate(state)
        assert gate.shape == (3,) and bool(((gate > 0) & (gate < 1)).all())
    else:
        with pytest.raises(LookupError, match="no halting gate"):
            model.gate(state)
