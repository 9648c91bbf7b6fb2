"""What every depth-recurrent model answers, whatever its family.

Shapes: `*` any leading row dimensions (a dense batch [B, T] or packed rows [N]), D width, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from halting_bench.architectures.attention import AttentionContext, DenseContext
from halting_bench.errors import UserError


@dataclass(frozen=True)
class Flops:
    """FLOPs of one stage for one row: `fixed + per_context * (positions attended to)`. A multiply-add is 2."""

    fixed: float
    per_context: float = 0.0

    def at(self, context: float) -> float:
        """FLOPs of one row that attends to `context` positions."""
        return self.fixed + self.per_context * context


@dataclass(frozen=True)
class LoopSpec:
    """One loop of a model."""

    name: str
    layers: int
    random_start: bool  # s_0 is drawn; False: it is a function of the input


@dataclass(frozen=True)
class ModelSpec:
    """What the engine must know of a model before it runs."""

    family: str
    width: int
    vocab_size: int
    max_length: int
    mean_recurrence: int  # trained mean depth, per loop
    loops: tuple[LoopSpec, ...]
    layers: int  # attention layers in all: the size of a K/V cache's first axis
    heads: int
    kv_heads: int
    head_width: int
    causal: bool = True
    fixed_recurrence: bool = False  # more loops than mean_recurrence are not defined
    has_gate: bool = False  # `gate` gives the model's own halting probability
    dense_only: bool = False  # positions mix outside attention too: rows can be neither packed nor cached


class RecurrentModel(nn.Module, ABC):
    """A model that applies one or more loops of shared weights. The model owns the iterate; a policy only watches it."""

    spec: ModelSpec

    @classmethod
    def build(cls, config: dict, tensors: Collection[str]) -> Self:
        """An instance for a checkpoint, before its weights are read.

        Args:
            config: the parsed config.json.
            tensors: names of the checkpoint's tensors, for families whose layout the config does not tell.
        """
        return cls(config)  # every family's constructor takes its config

    @abstractmethod
    def embed(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """Everything before the first loop. tokens: int64 [*]. Returns the embedded input e, [*, D]."""

    @abstractmethod
    def begin(self, loop: int, x: Tensor, noise: Tensor | None) -> Tensor:
        """The initial state s_0 of a loop.

        Args:
            loop: 0-based index into `spec.loops`.
            x: [*, D] the loop's input.
            noise: [*, D] standard normal truncated at 3 sigma (see `initial_noise`), or None for a zero start.
        """

    @abstractmethod
    def step(self, loop: int, state: Tensor, x: Tensor, context: AttentionContext) -> Tensor:
        """One application of a loop's core: s_{k-1} [*, D] -> s_k [*, D]."""

    @abstractmethod
    def end(self, loop: int, state: Tensor, context: AttentionContext) -> Tensor:
        """From the state a loop stopped at to the input of what follows (the next loop, or `readout`). [*, D]."""

    @abstractmethod
    def readout(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Coda and head: the result of the last `end`, [*, D] -> logits [*, V]."""

    def costs(self) -> dict[str, Flops]:
        """Counted FLOPs a row of each stage: keys `embed`, `step/0`, `step/1`, ..., `readout`.

        The last loop's `end` counts with `readout`, an earlier one's, which runs once at any depth, with `embed`. Unless a
        family states its own, they are counted by running each stage.
        """
        from halting_bench.architectures.flops import counted_costs

        return counted_costs(self)

    def gate(self, state: Tensor) -> Tensor:
        """The model's own probability of halting after this state: [*, D] -> [*] in (0, 1), at least float32.

        Raises LookupError when the model has none (`spec.has_gate` is False).
        """
        raise LookupError(f"a {self.spec.family} model has no halting gate")

    def keys_values(self, loop: int, state: Tensor, context: AttentionContext) -> dict[int, tuple[Tensor, Tensor]]:
        """Each core layer's key and value projections of a state, no block being run (CALM, arXiv 2207.07061, section 3.2).

        Args:
            loop: 0-based index into `spec.loops`.
            state: [*, D] states that rows exited with.
            context: tells their positions.

        Returns:
            layer -> rotated keys and values, [*, G, E].

        Raises:
            UserError: the family does not define it.
        """
        raise UserError(f"kv_mode 'propagate' is not defined for a {self.spec.family} model: type latest")

    def forward(self, tokens: Tensor, steps: int | tuple[int, ...], noise: Tensor | None = None) -> Tensor:
        """The plain uniform-depth forward: the slow, obvious reference of the engine.

        Args:
            tokens: int64 [B, T].
            steps: core applications, the same in every loop or one number a loop.
            noise: [B, T, D] or None.

        Returns:
            logits [B, T, V].
        """
        context = DenseContext(tokens.shape[1], causal=self.spec.causal, device=tokens.device)
        x = self.embed(tokens, context)
        for loop in range(len(self.spec.loops)):
            count = steps if isinstance(steps, int) else steps[loop]
            state = self.begin(loop, x, noise)
            for _ in range(count):
                state = self.step(loop, state, x, context)
            x = self.end(loop, state, context)
        return self.readout(x, context)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, in at least float32 whatever the model's dtype."""
    if x.dtype in (torch.float32, torch.float64):
        return torch.rms_norm(x, weight.shape, weight, eps)
    return torch.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight
