"""How the states of a loop move: step lengths, turning, contraction, and what becomes of them. Imports no torch.

Notation: x_k state after k steps, D_k = x_k - x_{k-1}. Shapes: N rows, K steps, D width; an orbit is [N, K + 1, D].
"""

import numpy as np

SETTLE_TOLERANCE = 1e-3
SETTLE_RATE = 0.95
DRIFT_COSINE = 0.5


def step_norms(orbit: np.ndarray) -> np.ndarray:
    """The length of every step, [N, K]."""
    return np.linalg.norm(np.diff(orbit, axis=1), axis=2)


def relative_steps(orbit: np.ndarray) -> np.ndarray:
    """Step length over the length of the new state, [N, K]."""
    return step_norms(orbit) / np.linalg.norm(orbit[:, 1:], axis=2)


def accelerations(orbit: np.ndarray) -> np.ndarray:
    """The length of D_k - D_{k-1}, [N, K - 1], from k = 2."""
    return np.linalg.norm(np.diff(orbit, n=2, axis=1), axis=2)


def step_cosines(orbit: np.ndarray) -> np.ndarray:
    """Cosine between successive steps, [N, K - 1], from k = 2; NaN where a step is zero."""
    steps, norms = np.diff(orbit, axis=1), step_norms(orbit)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.einsum("nkd,nkd->nk", steps[:, 1:], steps[:, :-1]) / (norms[:, 1:] * norms[:, :-1])


def contraction_rate(norms: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """The factor by which steps shrink each time, [N]: exp of the slope of log length over k, least squares.

    Args:
        norms: [N, K] step lengths.
        floor: lengths at or below it are rounding noise and are left out.

    Returns:
        NaN where fewer than two lengths are left.
    """
    used = norms > max(floor, 0.0)
    k = np.arange(norms.shape[1], dtype=float)
    log = np.log(np.where(used, norms, 1.0))
    count = used.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        centre = np.where(used, k - (used * k).sum(axis=1, keepdims=True) / count[:, None], 0.0)
        slope = (centre * log).sum(axis=1) / np.square(centre).sum(axis=1)
    return np.where(count >= 2, np.exp(slope), np.nan)


def fates(orbit: np.ndarray, tolerance: float = SETTLE_TOLERANCE) -> np.ndarray:
    """What each row's state does over the second half of its steps, [N] of "settle", "drift" and "orbit".

    settle: the relative step ends below `tolerance`, or steps still shrink by 5 % or more each time; drift: they do not,
    and go on in one direction (mean cosine above .5); orbit: they turn without shrinking.
    """
    half = orbit[:, orbit.shape[1] // 2 :]
    settles = (relative_steps(orbit)[:, -1] < tolerance) | (contraction_rate(step_norms(half)) < SETTLE_RATE)
    cosines = step_cosines(half)
    known = np.isfinite(cosines)
    straight = np.where(known, cosines, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1) > DRIFT_COSINE
    return np.where(settles, "settle", np.where(straight, "drift", "orbit"))


def drift_to_loop_ratio(stopped: np.ndarray, arrived: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """How far a state moves between two loops, over the mean step within the first of them, [N].

    Pappone et al. (arXiv 2509.23314): ||x_{g+1} - x_g^(K)|| / mean_k ||D_k||. Without layers between the loops the next
    one starts where this one stopped, and the ratio is 0: take its state after one step then.

    Args:
        stopped: [N, D] the state the first loop stopped at.
        arrived: [N, D] the state in the next loop.
        norms: [N, K] step lengths of the first loop up to where it stopped.
    """
    return np.linalg.norm(arrived - stopped, axis=1) / norms.mean(axis=1)


def principal_plane(orbit: np.ndarray) -> tuple[np.ndarray, float]:
    """Coordinates of every state in the plane of most variance, [N, K + 1, 2], and the share of variance in it.

    Rows are centred on where they end, so that a settling state winds into the origin whatever it settles to. NaN where some
    state is not finite.
    """
    moved = orbit - orbit[:, -1:]
    flat = moved.reshape(-1, orbit.shape[2])
    if not np.isfinite(flat).all():  # a model that diverged
        return np.full((*orbit.shape[:2], 2), np.nan), float("nan")
    values, vectors = np.linalg.eigh(flat.T @ flat)
    share = float(values[-2:].sum() / values.sum()) if values.sum() > 0 else float("nan")
    return (flat @ vectors[:, ::-1][:, :2]).reshape(*orbit.shape[:2], 2), share
