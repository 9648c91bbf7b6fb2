"""The halting-policy protocol: a policy watches, the model owns the iterate.

Shapes: R rows (independent halting decisions: positions while scoring, sequences while decoding), D width, V vocabulary.
Every entry of a State is row-first, so rows that halt are dropped by indexing: `{k: v[keep] for k, v in state.items()}`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, Tensor]


class View:
    """What a policy may look at after a core step. The latent is free; logits are priced and computed once."""

    def __init__(
        self,
        step: Tensor,
        latent: Tensor,
        readout: Callable[[], Tensor],
        gate: Callable[[], Tensor] | None = None,
        shared: bool = False,
        decided: Tensor | None = None,
        sequence: Tensor | None = None,
    ):
        """
        Args:
            step: int64 [R], core applications so far (0: the initial state; rows may differ).
            latent: [R, D] the state s_k.
            readout: runs coda and head for these rows, charges it, returns [R, V].
            gate: a model's own halting probability lambda_k, [R] in (0, 1); None when it has none.
            shared: the rows are the positions of one prompt, which stops as one: when all of them say so.
            decided: in a later loop of a model, int64 [R], the step at which the row halted in the first one (beyond every
                step where it did not); None in the first.
            sequence: of an encoder, int64 [R], a number for the sequence that each row is a position of. All of a sequence's
                active rows are in one view. None where positions come one after the other.
        """
        self.step = step
        self.latent = latent
        self._readout = readout
        self._gate = gate
        self.shared = shared
        self.decided = decided
        self.sequence = sequence
        self._logits: Tensor | None = None

    def logits(self) -> Tensor:
        """[R, V]. Runs coda and head at the first call and is charged for it then."""
        if self._logits is None:
            self._logits = self._readout()
        return self._logits

    def gate(self) -> Tensor:
        """[R] the model's own halting probability. Raises LookupError when the model has no gate."""
        if self._gate is None:
            raise LookupError("this model has no halting gate")
        return self._gate()


@dataclass(frozen=True)
class Verdict:
    """A decision per row. halt: bool [R]; score: [R] float32 (float64 when the model is), NaN where there is none."""

    halt: Tensor
    score: Tensor


class HaltingPolicy(ABC):
    """A rule that decides, row by row, when to stop.

    Hyperparameters are frozen dataclass fields of the subclass; whatever evolves lives in the State, so one policy
    object serves any number of runs and rows at once.
    """

    @property
    def needs_logits(self) -> bool:
        """Whether it may call `view.logits()`. A rule that never does may say False, and is then executed in rounds."""
        return True

    @property
    def first_loop_only(self) -> bool:
        """Whether it looks at the first loop of a model alone, and lets the others run what was decided there."""
        return False

    @abstractmethod
    def init(self, view: View) -> State:
        """The state before the first step. `view` shows s_0 (step 0); its readout is not defined."""

    @abstractmethod
    def step(self, view: View, state: State) -> tuple[Verdict, State]:
        """Looks at s_k (view.step == k, 1-based) and decides. Called at every step, whether or not it may halt there."""


def undefined_readout() -> Tensor:
    """The readout of a view of s_0. Raises LookupError: there is none."""
    raise LookupError("a readout of the initial state is not defined")


def wide(x: Tensor) -> Tensor:
    """At least float32: the precision in which signals are computed."""
    return x if x.dtype == torch.float64 else x.float()


def take_rows(state: State, rows: Tensor) -> State:
    """The state of some of the rows (an index or a bool mask)."""
    return {name: value[rows] for name, value in state.items()}
