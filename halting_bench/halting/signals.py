"""Signals: what to remember of a view, and how to compare it with the last one.

`Features` computes each quantity once a step, from the view and from what was remembered of the step before; a
`Signal` names the score and the features to remember. Adding a criterion is one function and one entry of SIGNALS.

Notation (policies in the literature): x_k latent, D_k = x_k - x_{k-1}, p_k = softmax(readout(x_k)), H_k its entropy in
nats. Norms are L2 over features, in float32 (float64 when the model runs in float64).
Shapes: R rows, D width, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from halting_bench.halting.policy import State, View, wide


class Features:
    """Quantities of one step, each computed at most once. `last` holds what was remembered of the step before."""

    def __init__(self, view: View, last: State | None):
        self.view = view
        self.last = last

    def remember(self, names: tuple[str, ...]) -> State:
        """The state for the next step. At step 0 logit features are undefined, and are NaN (an argmax: -1)."""
        return {name: getattr(self, name) for name in names}

    def _row(self, fill: float) -> Tensor:
        return torch.full_like(self.latent[:, 0], fill)

    @property
    def started(self) -> bool:
        """False at the initial state, where there is no step and no readout yet."""
        return self.last is not None

    def before(self, name: str) -> Tensor:
        if self.last is None:
            raise LookupError(f"no step before the initial state: '{name}' is not defined there")
        return self.last[name]

    @cached_property
    def latent(self) -> Tensor:
        return wide(self.view.latent)

    @cached_property
    def latent_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.latent, dim=-1)

    @cached_property
    def delta(self) -> Tensor:
        """D_k [R, D]; NaN at the initial state."""
        return self.latent - self.before("latent") if self.started else torch.full_like(self.latent, torch.nan)

    @cached_property
    def delta_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.delta, dim=-1) if self.started else self._row(torch.nan)

    def of_sequence(self, square: Tensor) -> Tensor:
        """The Frobenius norm over the rows of a sequence, from their squares, [R] -> [R]; of each row where it is alone."""
        sequence = self.view.sequence
        if sequence is None:
            return square.sqrt()
        total = square.new_zeros(int(sequence.max()) + 1).index_add(0, sequence, square)
        return total[sequence].sqrt()

    @cached_property
    def acceleration(self) -> Tensor:
        """The norm of D_k - D_{k-1}, [R]; NaN at k = 1."""
        return torch.linalg.vector_norm(self.delta - self.before("delta"), dim=-1)

    @cached_property
    def log_p(self) -> Tensor:
        """Log-probabilities log p_k [R, V]."""
        if not self.started:  # a readout of the initial state is not defined
            return torch.full((len(self.latent), 1), torch.nan, dtype=self.latent.dtype, device=self.latent.device)
        return torch.log_softmax(wide(self.view.logits()), dim=-1)

    @cached_property
    def p(self) -> Tensor:
        return self.log_p.exp()

    @cached_property
    def change_log_p(self) -> Tensor:
        """Change of log p_k [R, V]; NaN at k = 1. Summing it against p avoids a difference of two entropies."""
        return self.log_p - self.before("log_p")

    @cached_property
    def entropy(self) -> Tensor:
        return -torch.linalg.vecdot(self.p, self.log_p)

    @cached_property
    def top(self) -> Tensor:
        """The two largest log-probabilities, [R, 2]."""
        return self.log_p.topk(2, dim=-1).values

    @cached_property
    def argmax(self) -> Tensor:
        if not self.started:
            return torch.full_like(self.view.step, -1)
        return wide(self.view.logits()).argmax(dim=-1)

    @cached_property
    def unchanged(self) -> Tensor:
        """Consecutive comparisons that left the argmax as it was, [R] int64; -1 at k = 1, where there is none yet."""
        if not self.started:
            return torch.full_like(self.view.step, -1)
        run = torch.where(self.argmax == self.before("argmax"), self.before("unchanged").clamp(min=0) + 1, 0)
        return torch.where(self.view.step == 1, -1, run)

    @cached_property
    def min_p_log(self) -> Tensor:
        """Logarithm of p after entries below a tenth of the largest become 1/V, renormalised, [R, V]."""
        if not self.started:
            return self.log_p
        dropped = self.log_p < self.top[:, :1] + math.log(0.1)
        kept = self.log_p.masked_fill(dropped, -math.log(self.log_p.shape[-1]))
        return kept - kept.logsumexp(dim=-1, keepdim=True)

    @cached_property
    def survival(self) -> Tensor:
        """prod_{j<=k} (1 - lambda_j) of the model's own gate, [R]."""
        return self.before("survival") * (1 - wide(self.view.gate())) if self.started else self._row(1.0)

    @cached_property
    def halting_sum(self) -> Tensor:
        """sum_{j<=k} lambda_j of the model's own gate, [R]."""
        return self.before("halting_sum") + wide(self.view.gate()) if self.started else self._row(0.0)


@dataclass(frozen=True)
class Signal:
    """A score per row and step, and when it says stop.

    `first` is the first step with a defined score; `fires` says on which side of the threshold it halts, `closed`
    whether equality halts too. `whole_sequence`: an encoder's rows of one sequence share a score, and so stop together.
    `latent_passes` and `vocab_passes` count elementwise sweeps over D and V for the cost.
    """

    score: Callable[[Features], Tensor]
    remembers: tuple[str, ...]
    first: int
    fires: str  # "below" or "above"
    closed: bool = False
    needs_logits: bool = False
    needs_gate: bool = False
    whole_sequence: bool = False
    latent_passes: int = 0
    vocab_passes: int = 0

    def flops(self, width: int, vocab: int) -> int:
        """FLOPs a row and step of the comparison itself (a readout is counted apart)."""
        return 2 * (self.latent_passes * width + self.vocab_passes * vocab)


def _kl(f: Features) -> Tensor:
    return -torch.linalg.vecdot(f.before("p"), f.change_log_p)


def _min_p_kl(f: Features) -> Tensor:
    before = f.before("min_p_log")
    return torch.linalg.vecdot(before.exp(), before - f.min_p_log)


def _latent_diff_old(f: Features) -> Tensor:
    """Relative to the old state; NaN, not infinite, where that is zero."""
    before = f.before("latent_norm")
    return torch.where(before > 0, f.delta_norm / before, torch.nan)


def _attention_fixed_point(f: Features) -> Tensor:
    """The step of a whole sequence over its old state, both in the Frobenius norm; NaN where that is zero."""
    before = f.of_sequence(f.before("latent_norm").square())
    return torch.where(before > 0, f.of_sequence(f.delta_norm.square()) / before, torch.nan)


def _cosine(f: Features) -> Tensor:
    """1 - cos(x_k, x_{k-1}), computed as half the squared distance of the unit vectors: no cancellation near zero."""
    here = f.latent / f.latent_norm[:, None]
    before = f.before("latent") / f.before("latent_norm")[:, None]
    return 0.5 * (here - before).square().sum(dim=-1)


def _fixed_point_inf(f: Features) -> Tensor:
    return f.delta.abs().amax(dim=-1) / (f.latent.abs().amax(dim=-1) + 1e-8)


def _unchanged(f: Features) -> Tensor:
    return torch.where(f.unchanged < 0, torch.nan, f.unchanged.to(f.latent.dtype))


def _latent(
    score: Callable[[Features], Tensor], remembers: tuple[str, ...], first: int, passes: int, closed: bool = False
) -> Signal:
    return Signal(score, remembers, first, "below", closed=closed, latent_passes=passes)


def _logit(
    score: Callable[[Features], Tensor],
    remembers: tuple[str, ...],
    first: int,
    passes: int,
    fires: str = "below",
    closed: bool = False,
) -> Signal:
    return Signal(score, remembers, first, fires, closed=closed, needs_logits=True, vocab_passes=passes)


_STEP = ("latent",)
_TWO_STEPS = ("latent", "delta")
_LENGTHS = ("latent", "delta_norm")

SIGNALS: dict[str, Signal] = {
    "latent-diff": _latent(lambda f: f.delta_norm / f.latent_norm, _STEP, 1, 3),
    "latent-diff-old": _latent(_latent_diff_old, ("latent", "latent_norm"), 1, 3),
    "step-norm": _latent(lambda f: f.delta_norm, _STEP, 1, 2),
    "acceleration": _latent(lambda f: f.acceleration, _TWO_STEPS, 2, 3),
    "acceleration-rel": _latent(lambda f: f.acceleration / f.latent_norm, _TWO_STEPS, 2, 4),
    "acceleration-norm": _latent(
        lambda f: f.acceleration / (f.delta_norm + f.before("delta_norm")), ("latent", "delta", "delta_norm"), 2, 4
    ),
    "step-ratio": _latent(lambda f: f.delta_norm / f.before("delta_norm"), _LENGTHS, 2, 2, closed=True),
    "step-norm-change": _latent(lambda f: (f.delta_norm - f.before("delta_norm")).abs(), _LENGTHS, 2, 2),
    "step-norm-change-rel": _latent(
        lambda f: (f.delta_norm - f.before("delta_norm")).abs() / f.before("delta_norm"), _LENGTHS, 2, 2
    ),
    "cosine": _latent(_cosine, ("latent", "latent_norm"), 1, 4),
    "attention-fixed-point": Signal(
        _attention_fixed_point, ("latent", "latent_norm"), 1, "below", whole_sequence=True, latent_passes=3
    ),
    "fixed-point-inf": _latent(_fixed_point_inf, _STEP, 1, 3),
    "kl": _logit(_kl, ("log_p", "p"), 2, 4),
    "kl-reverse": _logit(lambda f: torch.linalg.vecdot(f.p, f.change_log_p), ("log_p",), 2, 4),
    "min-p-kl": _logit(_min_p_kl, ("min_p_log",), 2, 8),
    "entropy-diff": _logit(lambda f: (f.entropy - f.before("entropy")).abs(), ("entropy",), 2, 4),
    "entropy": _logit(lambda f: f.entropy, (), 1, 4),
    "max-prob": _logit(lambda f: f.top[:, 0].exp(), (), 1, 3, fires="above"),
    "margin": _logit(lambda f: f.top[:, 0].exp() - f.top[:, 1].exp(), (), 1, 3, fires="above"),
    "argmax-stable": _logit(_unchanged, ("argmax", "unchanged"), 2, 1, fires="above", closed=True),
    "gate-cdf": Signal(lambda f: 1 - f.survival, ("survival",), 1, "above", closed=True, needs_gate=True, latent_passes=1),
    "act": Signal(lambda f: f.halting_sum, ("halting_sum",), 1, "above", closed=True, needs_gate=True, latent_passes=1),
}
