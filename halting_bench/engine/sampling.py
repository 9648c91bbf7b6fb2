"""From logits to the next token.

Shapes: R rows, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halting_bench.errors import UserError
from halting_bench.halting.policy import wide


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. The default is greedy.

    A sequence's draws come from its own generator, keyed by (seed, uid): they are the same alone, in any batch and order.
    """

    temperature: float = 0.0  # 0: the argmax
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature {self.temperature} must be at least 0: type 0 for greedy decoding")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k {self.top_k} must be at least 1: leave it out to keep all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} must lie in (0, 1]: leave it out to keep all tokens")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def uniforms(self, uid: int, count: int) -> Tensor:
        """The sequence's uniform draws in [0, 1), float64 [count], one a new token."""
        return torch.from_numpy(np.random.Generator(np.random.Philox(key=[self.seed, uid])).random(count))

    def draw(self, logits: Tensor, uniforms: Tensor | None) -> Tensor:
        """The next tokens, int64 [R].

        Args:
            logits: [R, V].
            uniforms: float64 [R]; None when greedy.
        """
        if uniforms is None:
            return logits.argmax(dim=-1)
        p, order = torch.softmax(wide(logits) / self.temperature, dim=-1).double().sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            p[:, self.top_k :] = 0
        if self.top_p is not None:  # the smallest set that holds top_p of what top_k left, so never empty
            mass = p.cumsum(dim=-1)
            p = p.masked_fill(mass - p >= self.top_p * mass[:, -1:], 0)
        mass = p.cumsum(dim=-1)
        drawn = (mass <= uniforms[:, None] * mass[:, -1:]).sum(dim=-1, keepdim=True)
        return order.gather(1, drawn)[:, 0]
