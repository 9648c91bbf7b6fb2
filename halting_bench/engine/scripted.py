"""A policy that stops where a script says: for tests and measurements of the runtime, with no rule in the way."""

from dataclasses import dataclass

import torch
from torch import Tensor

from halting_bench.halting.policies import ThresholdPolicy
from halting_bench.halting.policy import HaltingPolicy, State, Verdict, View, wide


@dataclass(frozen=True)
class ScriptedExits(HaltingPolicy):
    """Rows exit at steps spread evenly over low..high, drawn from the bits of their initial state.

    A row's exit depends on nothing but its own noise, so it is the same in any batch; models that do not start from
    noise give all rows of a token the same exit. `signal` is computed at every step and ignored.
    """

    low: int
    high: int
    signal: str = "latent-diff"

    @property
    def rule(self) -> ThresholdPolicy:
        return ThresholdPolicy(self.signal, threshold=-1.0)

    @property
    def needs_logits(self) -> bool:
        return self.rule.needs_logits

    def init(self, view: View) -> State:
        return {**self.rule.init(view), "exit": self._draw(view.latent)}

    def step(self, view: View, state: State) -> tuple[Verdict, State]:
        verdict, after = self.rule.step(view, state)
        return Verdict(view.step >= state["exit"], verdict.score), {**after, "exit": state["exit"]}

    def _draw(self, latent: Tensor) -> Tensor:
        bits = (wide(latent[:, 0]).abs().double() * 2.0**30).long() & 0xFFFFF
        return self.low + torch.remainder(bits * 2654435761 >> 7, self.high - self.low + 1)
