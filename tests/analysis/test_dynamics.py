"""Dynamics of orbits whose answers are known."""

import numpy as np
import pytest

from halting_bench.analysis import dynamics


def spiral(rate: float, angle: float, steps: int = 24, rows: int = 3, width: int = 6) -> np.ndarray:
    """States that turn by `angle` and shrink by `rate` each step around a point of their own, in a random plane."""
    rng = np.random.default_rng(0)
    out = []
    for _ in range(rows):
        plane, _ = np.linalg.qr(rng.normal(size=(width, 2)))
        radius, phase = rate ** np.arange(steps + 1), angle * np.arange(steps + 1)
        out.append(np.stack([radius * np.cos(phase), radius * np.sin(phase)], axis=1) @ plane.T + rng.normal(size=width))
    return np.stack(out)


def test_a_shrinking_spiral_has_the_rate_and_the_angle_it_was_made_with() -> None:
    orbit = spiral(0.7, 0.9)
    np.testing.assert_allclose(dynamics.contraction_rate(dynamics.step_norms(orbit)), 0.7, rtol=1e-6)
    np.testing.assert_allclose(dynamics.step_cosines(orbit)[:, :10], np.cos(0.9), rtol=1e-6)
    assert set(dynamics.fates(orbit)) == {"settle"}


def test_a_circle_orbits_and_a_straight_line_drifts() -> None:
    assert set(dynamics.fates(spiral(1.0, 2.0))) == {"orbit"}
    line = np.arange(20.0)[None, :, None] * np.array([1.0, 2.0])
    assert set(dynamics.fates(line)) == {"drift"}
    np.testing.assert_allclose(dynamics.accelerations(line), 0.0, atol=1e-12)


def test_a_state_that_has_stopped_has_settled_and_its_cosine_is_undefined() -> None:
    still = np.ones((2, 9, 4))
    still[:, 0] = 0.0
    assert set(dynamics.fates(still)) == {"settle"}
    assert np.isnan(dynamics.step_cosines(still)).all()
    assert np.isnan(dynamics.contraction_rate(dynamics.step_norms(still))).all()


def test_rounding_noise_is_left_out_of_the_rate() -> None:
    norms = np.maximum(0.5 ** np.arange(40.0), 1e-6)[None]
    assert dynamics.contraction_rate(norms, floor=1e-6) == pytest.approx(0.5)
    assert dynamics.contraction_rate(norms)[0] > 0.6


def test_the_drift_ratio_divides_the_jump_by_the_mean_step() -> None:
    norms = np.array([[4.0, 2.0], [1.0, 1.0]])
    ratio = dynamics.drift_to_loop_ratio(np.zeros((2, 3)), np.array([[0.0, 6.0, 0.0], [3.0, 0.0, 4.0]]), norms)
    np.testing.assert_allclose(ratio, [2.0, 5.0])


def test_a_planar_orbit_lies_in_its_principal_plane_and_ends_in_the_origin() -> None:
    orbit = spiral(0.8, 1.0, rows=1)
    plane, share = dynamics.principal_plane(orbit)
    assert share == pytest.approx(1.0)
    np.testing.assert_allclose(plane[:, -1], 0.0, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(np.diff(plane, axis=1), axis=2), dynamics.step_norms(orbit), rtol=1e-9)
