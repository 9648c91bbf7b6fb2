"""`diagnose`: runs a model and describes how its states move within each loop and from one loop to the next.

A loop is followed for `steps` steps, but hands on the state of its trained depth, as in use. Shapes: N rows, K steps,
D width.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halting_bench import catalog
from halting_bench.analysis import dynamics
from halting_bench.analysis.statistics import mean_interval
from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.base import NOT_SCORED, Sequence
from halting_bench.doctor import noise_floor
from halting_bench.engine.trace import batch_noise, pad_batch
from halting_bench.errors import UserError
from halting_bench.sources import ModelSource

ROWS = 512
DRAWN_ORBITS = 8
LOGGED_ORBITS = 4
RATES_ABOVE = 1e-6
"""Steps shorter than this share of the first one are rounding, and no contraction is read from them."""


@dataclass(frozen=True)
class Orbits:
    """States of the same N rows in every loop."""

    loops: tuple[np.ndarray, ...]  # [N, K + 1, D] each
    document: np.ndarray  # [N]
    handed: int  # steps after which a loop hands on


@torch.no_grad()  # not inference mode: a training run looks too, and what a model caches must stay usable there
def record_orbits(
    model: RecurrentModel, sequences: list[Sequence], *, steps: int | None = None, seed: int = 0, rows: int = ROWS
) -> Orbits:
    """Follows the states of up to `rows` scored positions, drawn by seed.

    Args:
        model: of any family.
        sequences: run as one batch.
        steps: of every loop; none: twice the trained number, or the trained number where there are no more.

    Raises:
        UserError: fewer steps than the model was trained for.
    """
    spec = model.spec
    steps = steps or (spec.mean_recurrence if spec.fixed_recurrence else 2 * spec.mean_recurrence)
    if steps < spec.mean_recurrence:
        raise UserError(f"{steps} steps are fewer than the trained {spec.mean_recurrence}: give at least that many")
    tokens, targets = pad_batch(sequences)
    where = np.argwhere(targets.numpy() != NOT_SCORED)
    chosen = np.sort(np.random.default_rng(seed).permutation(len(where))[:rows])
    sequence, position = where[chosen].T
    device = next(model.parameters()).device
    lengths = torch.tensor([len(s.tokens) for s in sequences], device=device)
    context = DenseContext(tokens.shape[1], causal=spec.causal, lengths=lengths, device=device)
    noise = batch_noise(model, sequences, tokens.shape[1], seed)

    def kept(state: Tensor) -> np.ndarray:
        return state[sequence, position].double().cpu().numpy()

    x, found = model.embed(tokens.to(device), context), []
    for loop in range(len(spec.loops)):
        state = handed = model.begin(loop, x, None if noise is None else noise.to(x))
        states = [kept(state)]
        for k in range(1, steps + 1):
            state = model.step(loop, state, x, context)
            states.append(kept(state))
            handed = state if k == spec.mean_recurrence else handed
        found.append(np.stack(states, axis=1))
        x = model.end(loop, handed, context)
    document = np.array([s.document for s in sequences])[sequence]
    return Orbits(tuple(found), document, spec.mean_recurrence)


def diagnose(model: RecurrentModel, sequences: list[Sequence], *, steps: int | None = None, seed: int = 0) -> dict[str, Any]:
    """Everything that `diagnose` prints, JSON-able. See `record_orbits` for the arguments."""
    orbits = record_orbits(model, sequences, steps=steps, seed=seed)
    names = [loop.name for loop in model.spec.loops]
    return {
        "rows": len(orbits.document),
        "steps": orbits.loops[0].shape[1] - 1,
        "handed_on_after": orbits.handed,
        "loops": {name: describe_loop(orbit) for name, orbit in zip(names, orbits.loops, strict=True)},
        "hand_offs": {f"{a} -> {b}": hand_off(orbits, g) for g, (a, b) in enumerate(pairwise(names))},
    }


def diagnose_source(
    source: ModelSource, benchmark: str | None, *, documents: int, steps: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Diagnoses a model on the first sequence of each document, with the rounding noise of its signals by dtype.

    Args:
        source: the model.
        benchmark: its name; None: the first that the model's card names, or docs.
        documents: how many.
        steps, seed: see `record_orbits`.
    """
    if benchmark is None:
        named = catalog.find_model(str(source.folder))[1].benchmarks if source.folder else ()
        benchmark = named[0] if named else "docs"
    model = source.load()
    chosen = source.benchmark(benchmark, model.spec)
    sequences = [chosen.sequences(document)[0] for document in chosen.sample(documents, 0)]
    floor = noise_floor(model, lambda dtype: source.load(dtype=dtype), seed)
    found = diagnose(model, sequences, steps=steps, seed=seed)
    floors = {check.name: _rounded(check.figure) for check in floor}
    return {"benchmark": benchmark} | found | {"noise_floor": floors, "training": logged(source.folder)}


def logged(folder: Path | None) -> list[dict[str, Any]]:
    """What the training log beside a model kept of each checkpoint: `step` and a `summary`. Empty without one."""
    log = folder / "log.jsonl" if folder else None
    if log is None or not log.is_file():
        return []
    try:
        entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
        kept = [{"step": entry["step"]} | entry["dynamics"] for entry in entries if "dynamics" in entry]
        for entry in kept:
            _check_entry(entry, kept[0])
        return kept
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{log} is not a training log ({error}): remove it, or train again") from None


def _check_entry(entry: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError for an entry of a log that cannot be drawn beside the first."""
    math.isfinite(entry["step"])
    for name in first["loops"]:
        for key in ("relative_step", "cosine", "contraction_rate"):
            _rounded(entry["loops"][name][key])
        for row in entry["loops"][name].get("orbits", ()):
            if np.array(row, dtype=float).shape[1:] != (2,):
                raise ValueError(f"an orbit of {name} at step {entry['step']} is not in a plane")
    for hand in first["drift_to_loop"]:
        _rounded(entry["drift_to_loop"][hand])


def describe_loop(orbit: np.ndarray) -> dict[str, Any]:
    """Medians by step, contraction, fates and a few orbits in their principal plane."""
    norms = dynamics.step_norms(orbit)
    fates = dynamics.fates(orbit)
    plane, share = dynamics.principal_plane(orbit)
    rate = dynamics.contraction_rate(norms, floor=RATES_ABOVE * float(np.median(norms[:, 0])))
    return {
        "step_norm": _medians(norms),
        "relative_step": _medians(dynamics.relative_steps(orbit)),
        "acceleration": [None, *_medians(dynamics.accelerations(orbit))],
        "cosine": [None, *_medians(dynamics.step_cosines(orbit))],
        "contraction_rate": _rounded(float(np.nanmedian(rate))) if np.isfinite(rate).any() else None,
        "fates": {fate: int((fates == fate).sum()) for fate in ("settle", "orbit", "drift")},
        "plane_share": _rounded(share),
        "orbits": [[[_rounded(float(v)) for v in point] for point in row] for row in plane[:DRAWN_ORBITS]],
    }


def hand_off(orbits: Orbits, loop: int) -> dict[str, Any]:
    """The drift-to-loop ratio between a loop and the next, with a 95 % interval over documents.

    `across` says which form it is: "layers" where plain layers stand between, "first step" where none do.
    """
    stopped, following = orbits.loops[loop][:, orbits.handed], orbits.loops[loop + 1]
    apart = not np.array_equal(stopped, following[:, 0])
    arrived = following[:, 0] if apart else following[:, 1]
    ratio = dynamics.drift_to_loop_ratio(stopped, arrived, dynamics.step_norms(orbits.loops[loop])[:, : orbits.handed])
    _, document = np.unique(orbits.document, return_inverse=True)
    sums, counts = np.bincount(document, ratio), np.bincount(document)
    mean, low, high = (float(value[0]) for value in mean_interval(sums[None], counts, bounded=False))
    return {
        "across": "layers" if apart else "first step",
        "drift_to_loop": _rounded(mean),
        "low": _rounded(low),
        "high": _rounded(high),
        "median": _rounded(float(np.median(ratio))),
    }


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a training log keeps of every checkpoint: a diagnosis at the trained depth, medians by step, and a few orbits."""
    last = found["handed_on_after"] - 1
    return {
        "loops": {
            name: {
                "relative_step": loop["relative_step"][last],
                "cosine": loop["cosine"][last] if last else None,
                "contraction_rate": loop["contraction_rate"],
                "fates": loop["fates"],
                "step_norms": loop["step_norm"],
                "cosines": loop["cosine"],
                "plane_share": loop["plane_share"],
                "orbits": [[[_rounded(v, 3) for v in point] for point in row] for row in loop["orbits"][:LOGGED_ORBITS]],
            }
            for name, loop in found["loops"].items()
        },
        "drift_to_loop": {name: hand["drift_to_loop"] for name, hand in found["hand_offs"].items()},
    }


def _medians(values: np.ndarray) -> list[float | None]:
    """Over rows; None where no row has a finite value."""
    return [_rounded(float(np.median(c[np.isfinite(c)]))) if np.isfinite(c).any() else None for c in values.T]


def _rounded(value: float | None, digits: int = 5) -> float | None:
    """So many significant digits; None instead of NaN."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")
