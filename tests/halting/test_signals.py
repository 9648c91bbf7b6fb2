"""Every signal against its textbook formula, written slowly in float64, and against the public implementation's numbers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from views import Trajectory, run, settling

from halting_bench.halting.policies import ThresholdPolicy
from halting_bench.halting.policy import View
from halting_bench.halting.signals import SIGNALS, Features

GOLDEN = Path(__file__).parents[1] / "golden" / "huginn" / "golden.safetensors"
Row = list[np.ndarray]
"""One row's vectors by step, s_0 first."""


def softmax(z: np.ndarray) -> np.ndarray:
    return np.exp(z - z.max()) / np.exp(z - z.max()).sum()


def entropy(p: np.ndarray) -> float:
    return -sum(float(q * np.log(q)) for q in p)


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return sum(float(a * np.log(a / b)) for a, b in zip(p, q, strict=True))


def min_p(p: np.ndarray) -> np.ndarray:
    kept = np.where(p < 0.1 * p.max(), 1 / len(p), p)
    return kept / kept.sum()


def length(v: np.ndarray) -> float:
    return float(np.sqrt((v * v).sum()))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b) / (length(a) * length(b))


def unchanged(z: Row, k: int) -> float:
    run_length = 0
    while run_length < k - 1 and z[k - run_length].argmax() == z[k - run_length - 1].argmax():
        run_length += 1
    return run_length


TEXTBOOK: dict[str, tuple[int, Callable[[Row, Row, Row, int], float]]] = {
    "latent-diff": (1, lambda x, z, g, k: length(x[k] - x[k - 1]) / length(x[k])),
    "latent-diff-old": (1, lambda x, z, g, k: length(x[k] - x[k - 1]) / length(x[k - 1])),
    "step-norm": (1, lambda x, z, g, k: length(x[k] - x[k - 1])),
    "acceleration": (2, lambda x, z, g, k: length(x[k] - 2 * x[k - 1] + x[k - 2])),
    "acceleration-rel": (2, lambda x, z, g, k: length(x[k] - 2 * x[k - 1] + x[k - 2]) / length(x[k])),
    "acceleration-norm": (
        2,
        lambda x, z, g, k: length(x[k] - 2 * x[k - 1] + x[k - 2]) / (length(x[k] - x[k - 1]) + length(x[k - 1] - x[k - 2])),
    ),
    "step-ratio": (2, lambda x, z, g, k: length(x[k] - x[k - 1]) / length(x[k - 1] - x[k - 2])),
    "step-norm-change": (2, lambda x, z, g, k: abs(length(x[k] - x[k - 1]) - length(x[k - 1] - x[k - 2]))),
    "step-norm-change-rel": (
        2,
        lambda x, z, g, k: abs(length(x[k] - x[k - 1]) - length(x[k - 1] - x[k - 2])) / length(x[k - 1] - x[k - 2]),
    ),
    "attention-fixed-point": (1, lambda x, z, g, k: length(x[k] - x[k - 1]) / length(x[k - 1])),  # a sequence of one row
    "cosine": (1, lambda x, z, g, k: 1 - cosine(x[k], x[k - 1])),
    "fixed-point-inf": (1, lambda x, z, g, k: float(np.abs(x[k] - x[k - 1]).max() / (np.abs(x[k]).max() + 1e-8))),
    "kl": (2, lambda x, z, g, k: kl(softmax(z[k - 1]), softmax(z[k]))),
    "kl-reverse": (2, lambda x, z, g, k: kl(softmax(z[k]), softmax(z[k - 1]))),
    "min-p-kl": (2, lambda x, z, g, k: kl(min_p(softmax(z[k - 1])), min_p(softmax(z[k])))),
    "entropy-diff": (2, lambda x, z, g, k: abs(entropy(softmax(z[k])) - entropy(softmax(z[k - 1])))),
    "entropy": (1, lambda x, z, g, k: entropy(softmax(z[k]))),
    "max-prob": (1, lambda x, z, g, k: float(softmax(z[k]).max())),
    "margin": (1, lambda x, z, g, k: float(np.diff(np.sort(softmax(z[k])))[-1])),
    "argmax-stable": (2, lambda x, z, g, k: unchanged(z, k)),
    "gate-cdf": (1, lambda x, z, g, k: 1 - float(np.prod([1 - g[j] for j in range(1, k + 1)]))),
    "act": (1, lambda x, z, g, k: sum(float(g[j]) for j in range(1, k + 1))),
}
"""signal -> (first step at which it is defined, formula(latents, logits, gates of one row, step))."""


def scores(signal: str, seen: Trajectory) -> np.ndarray:
    """[K, R]."""
    return run(ThresholdPolicy(signal, 0.1), seen)[1]


def test_every_signal_has_a_textbook_formula():
    assert TEXTBOOK.keys() == SIGNALS.keys()


@pytest.mark.parametrize("signal", SIGNALS)
def test_it_is_its_textbook_formula_and_nan_before_it_is_defined(signal):
    seen = settling()
    first, formula = TEXTBOOK[signal]
    x, z, g = (a.numpy() for a in (seen.latent, seen.logits, seen.gate))
    wanted = np.full((seen.steps, seen.rows), np.nan)
    for row in range(seen.rows):
        for k in range(first, seen.steps + 1):
            wanted[k - 1, row] = formula(list(x[:, row]), list(z[:, row]), list(g[:, row]), k)
    np.testing.assert_allclose(scores(signal, seen), wanted, rtol=1e-9, atol=1e-14)
    assert SIGNALS[signal].first == first


@pytest.mark.parametrize("signal", SIGNALS)
def test_scores_are_float32_for_low_precision_states_and_float64_for_float64(signal):
    seen = settling()
    low = Trajectory(*(a.to(torch.bfloat16) for a in (seen.latent, seen.logits, seen.gate)))
    assert scores(signal, low).dtype == np.float32
    assert scores(signal, seen).dtype == np.float64


@pytest.mark.parametrize("signal", [name for name, s in SIGNALS.items() if not s.needs_logits])
def test_a_signal_that_says_it_needs_no_logits_reads_none(signal):
    seen = settling()

    def priced() -> torch.Tensor:
        raise AssertionError("logits were read")

    policy = ThresholdPolicy(signal, 0.1)
    assert not policy.needs_logits
    views = [View(v.step, v.latent, priced, v.gate) for v in (seen.view(k, torch.arange(seen.rows)) for k in range(3))]
    state = policy.init(views[0])
    for view in views[1:]:
        state = policy.step(view, state)[1]


def test_logits_are_run_once_a_view_however_many_signals_read_them():
    seen, calls = settling(), []
    rows = torch.arange(seen.rows)

    def readout() -> torch.Tensor:
        calls.append(1)
        return seen.logits[1]

    view = View(torch.ones(seen.rows, dtype=torch.int64), seen.latent[1], readout)
    features = Features(view, Features(seen.view(0, rows), None).remember(("log_p", "p", "entropy", "argmax", "unchanged")))
    for signal in ("entropy", "max-prob", "kl", "argmax-stable", "entropy-diff"):
        SIGNALS[signal].score(features)
    assert len(calls) == 1


@pytest.mark.parametrize("signal", ["latent-diff-old", "cosine"])
def test_a_zero_initial_state_gives_nan_not_a_stand_in(signal):
    seen = settling()
    zero = Trajectory(seen.latent * (torch.arange(seen.steps + 1) > 0)[:, None, None], seen.logits, seen.gate)
    found = scores(signal, zero)
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1:]).all()


@pytest.mark.parametrize(("signal", "relative", "absolute"), [("cosine", 0.05, 0), ("kl", 0, 3e-7), ("kl-reverse", 0, 3e-7)])
def test_nearly_equal_states_keep_their_digits_in_float32(signal, relative, absolute):
    """1 - cos in float32 is good to 1e-7 at best, far above the differences at which a state has settled."""
    seen = settling(steps=2)
    latent, logits = seen.latent[:1].expand(3, -1, -1).clone(), seen.logits[1:2].expand(3, -1, -1).clone()
    latent[2] += 1e-4 * seen.latent[1]
    logits[2] += 1e-3 * seen.logits[2]
    exact = scores(signal, Trajectory(latent, logits, seen.gate))[1]
    rounded = scores(signal, Trajectory(latent.float(), logits.float(), seen.gate.float()))[1]
    np.testing.assert_allclose(rounded, exact, rtol=relative, atol=absolute)
    assert exact.max() < 1e-5


GOLDEN_NAMES = {"minp-kl": "min-p-kl", "argmax-stability": "argmax-stable"}
SENTINELS = ("kl", "min-p-kl", "entropy-diff", "argmax-stable")
"""Where the public code compares the first step with a stand-in (a uniform distribution, 100), ours is NaN."""


def golden_cases() -> list[tuple[str, str]]:
    found = [name.removeprefix("value/") for name in load_file(GOLDEN) if name.startswith("value/")]
    return [(name, GOLDEN_NAMES.get(name, name)) for name in found]


@pytest.mark.parametrize(("theirs", "ours"), golden_cases())
def test_it_equals_what_the_public_implementation_reports(theirs, ours):
    golden = load_file(GOLDEN)
    states = np.concatenate((golden["state_0"][None], golden["states"]))  # [13, B, T, D]
    logits = np.concatenate((np.zeros_like(golden["logits"][:1]), golden["logits"]))
    found = []
    for b in range(states.shape[1]):
        seen = Trajectory(*(torch.from_numpy(a[:, b]) for a in (states, logits, np.full(states.shape[:3], np.float32(0.5)))))
        score = scores(ours, seen)  # [12, T]
        found.append(score[:, -1] if SIGNALS[ours].needs_logits else score.mean(axis=1))
    first = 1 if ours in SENTINELS else 0
    got, wanted = np.stack(found, axis=1)[first:], golden[f"value/{theirs}"][first:]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert np.isfinite(got).all()
