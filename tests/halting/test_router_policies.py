"""Routers as policies: what a gate adds up, where it is silent, and that a stricter threshold waits."""

import numpy as np
import pytest
import torch
from views import Trajectory, random_router, run, run_compacted, settling

from halting_bench.halting.routers import RouterPolicy
from halting_bench.halting.signals import SIGNALS

SEEN = settling(rows=8, steps=9)


@pytest.mark.parametrize("first", [1, 2, 4])
def test_a_gate_scores_one_minus_the_product_of_what_each_step_left(first: int) -> None:
    router = random_router("gate", first=first)
    _, scores = run(RouterPolicy(router, 0.5), SEEN)
    weight, bias = router.weight[0].numpy(), float(router.bias)
    for row in range(SEEN.rows):
        left = 1.0
        for k in range(1, SEEN.steps + 1):
            if k < first:
                assert np.isnan(scores[k - 1, row])
                continue
            left *= 1 - 1 / (1 + np.exp(-(float(SEEN.latent[k, row].numpy() @ weight) + bias)))
            assert scores[k - 1, row] == pytest.approx(1 - left, abs=1e-14)


def test_a_linear_router_scores_each_step_alone() -> None:
    _, linear = run(RouterPolicy(random_router("linear"), 0.5), SEEN)
    _, gate = run(RouterPolicy(random_router("gate"), 0.5), SEEN)
    np.testing.assert_allclose(linear[1], gate[1], atol=1e-15)  # the first step that it may speak at
    np.testing.assert_allclose(linear[2:], 1 - (1 - gate[2:]) / (1 - gate[1:-1]), atol=1e-12)


def test_a_gate_halts_at_equality_and_a_linear_router_above_it() -> None:
    for kind, halts in (("gate", True), ("linear", False)):
        _, scores = run(RouterPolicy(random_router(kind), 0.5), SEEN)
        told, _ = run(RouterPolicy(random_router(kind), float(scores[3, 0])), SEEN)
        assert bool(told[3, 0]) is halts


@pytest.mark.parametrize("kind", ["linear", "gate"])
def test_a_stricter_threshold_never_halts_earlier(kind: str) -> None:
    grid = (0.9, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1)
    exits = np.stack([run_compacted(RouterPolicy(random_router(kind), t), SEEN)[0] for t in grid])
    assert (np.diff(exits, axis=0) <= 0).all()
    assert (exits[0] > exits[-1]).any()


def test_a_gate_s_probabilities_never_shrink_its_score() -> None:
    _, scores = run(RouterPolicy(random_router("gate", first=1), 0.5), SEEN)
    assert (np.diff(scores, axis=0) > 0).all()
    assert not torch.from_numpy(scores).isnan().any()


def test_a_router_may_see_the_logarithms_of_the_relative_step_and_of_the_acceleration() -> None:
    router = random_router("linear", inputs="latent+change")
    _, scores = run(RouterPolicy(router, 0.5), SEEN)
    weight, bias, path = router.weight[0].numpy(), float(router.bias), SEEN.latent.numpy()
    for row in range(SEEN.rows):
        assert np.isnan(scores[0, row])
        for k in range(2, SEEN.steps + 1):
            step, before = path[k, row] - path[k - 1, row], path[k - 1, row] - path[k - 2, row]
            relative = np.linalg.norm(step) / np.linalg.norm(path[k, row])
            seen = np.array([*path[k, row], np.log(relative + 1e-12), np.log(np.linalg.norm(step - before) + 1e-12)])
            assert scores[k - 1, row] == pytest.approx(1 / (1 + np.exp(-(float(seen @ weight) + bias))), abs=1e-12)


def test_a_state_at_rest_has_a_score_like_any_other() -> None:
    still = Trajectory(*(part[:1].expand(6, *part.shape[1:]) for part in (SEEN.latent, SEEN.logits, SEEN.gate)))
    _, scores = run(RouterPolicy(random_router("gate", inputs="latent+change"), 0.5), still)
    assert np.isfinite(scores[1:]).all()


def test_what_a_router_sees_beside_the_state_is_counted() -> None:
    plain, moving = (random_router("linear", inputs=inputs) for inputs in ("latent", "latent+change"))
    signals = sum(SIGNALS[name].flops(5, 0) for name in ("latent-diff", "acceleration"))
    assert plain.flops() == 2 * 5 and moving.flops() == 2 * 7 + signals
