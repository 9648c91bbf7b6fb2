"""Diagnoses of small models, against the states written out."""

import json

import numpy as np
import pytest
import torch

from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.two_scale import TwoScale
from halting_bench.benchmarks.base import NOT_SCORED, Sequence
from halting_bench.diagnosis import diagnose, record_orbits, summary
from halting_bench.errors import UserError

torch.set_num_threads(1)
CONFIG = {
    "vocab_size": 24, "n_embd": 16, "n_head": 2, "n_inner": 32, "n_positions": 32, "plain_layers": [1, 1, 0, 1],
    "loop_layers": [1, 2, 1], "injection": "gate", "mean_recurrence": 3, "norm_eps": 1e-6, "rope_theta": 1000.0,
}  # fmt: skip


def tiny() -> TwoScale:
    torch.manual_seed(0)
    model = TwoScale(CONFIG).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.2)
    return model


def texts(count: int = 3) -> list[Sequence]:
    rng = np.random.default_rng(0)
    out = []
    for index in range(count):
        tokens = rng.integers(0, 24, 6 + index)
        targets = np.where(np.arange(len(tokens)) > 2, tokens, NOT_SCORED)
        out.append(Sequence(index, index, tokens, targets))
    return out


def test_orbits_are_the_states_and_a_loop_hands_on_its_trained_depth() -> None:
    model, sequences = tiny(), texts()
    orbits = record_orbits(model, sequences, steps=5)
    assert len(orbits.document) == sum(int((s.targets != NOT_SCORED).sum()) for s in sequences)
    rows = []
    for sequence in sequences:
        context = DenseContext(len(sequence.tokens))
        x = model.embed(torch.from_numpy(sequence.tokens)[None], context)
        kept = []
        for loop in range(3):
            states = [model.begin(loop, x, None)]
            for _ in range(5):
                states.append(model.step(loop, states[-1], x, context))
            kept.append(torch.stack(states, dim=2)[0, 3:])
            x = model.end(loop, states[3], context)
        rows.append(kept)
    for loop in range(3):
        expected = torch.cat([kept[loop] for kept in rows]).numpy()
        np.testing.assert_allclose(orbits.loops[loop], expected, rtol=0, atol=1e-10)


def test_every_hand_off_says_what_it_was_measured_across() -> None:
    found = diagnose(tiny(), texts(), steps=6)
    assert {name: hand["across"] for name, hand in found["hand_offs"].items()} == {
        "group 1 -> group 2": "layers",
        "group 2 -> group 3": "first step",
    }
    assert all(hand["low"] <= hand["drift_to_loop"] <= hand["high"] for hand in found["hand_offs"].values())
    assert all(sum(loop["fates"].values()) == found["rows"] for loop in found["loops"].values())
    assert all(len(loop["step_norm"]) == 6 and loop["cosine"][0] is None for loop in found["loops"].values())
    json.dumps(found, allow_nan=False)


def test_a_log_keeps_a_diagnosis_at_the_trained_depth_and_a_few_orbits() -> None:
    found = diagnose(tiny(), texts())
    kept = summary(found)
    assert found["steps"] == 6
    assert kept["drift_to_loop"] == {name: hand["drift_to_loop"] for name, hand in found["hand_offs"].items()}
    assert kept["loops"]["group 2"]["relative_step"] == found["loops"]["group 2"]["relative_step"][2]
    for name, loop in kept["loops"].items():
        assert loop["cosines"] == found["loops"][name]["cosine"]
        np.testing.assert_allclose(loop["orbits"], np.array(found["loops"][name]["orbits"])[:4], rtol=1e-2)
        assert loop["orbits"][0][-1] == [0, 0]  # centred on where it ends


def test_a_model_that_diverged_is_described_without_a_plane() -> None:
    model = tiny()
    model.transformer["looped"][1][0].norm_1.weight[0] = torch.inf
    with np.errstate(invalid="ignore", over="ignore"):
        found = diagnose(model, texts())
    assert found["loops"]["group 1"]["plane_share"] is not None and found["loops"]["group 2"]["plane_share"] is None
    json.dumps(summary(found), allow_nan=False)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UserError, match="fewer than the trained 3"):
        record_orbits(tiny(), texts(), steps=2)
