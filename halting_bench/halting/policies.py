"""The policies: a threshold on one signal, a fixed depth, and combinations.

Shapes: R rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from halting_bench.halting.policy import HaltingPolicy, State, Verdict, View
from halting_bench.halting.signals import SIGNALS, Features, Signal


@dataclass(frozen=True)
class ThresholdPolicy(HaltingPolicy):
    """Halts when a signal has been on the right side of a threshold at `hits` consecutive checks.

    `min_steps` forbids halting before that step (hits may gather earlier); `every` checks at steps that are multiples
    of it, while the state is stepped at every step, so that a difference never spans several. A NaN score never halts
    and breaks a run of hits.

    The threshold is copied into the state per row, so that rows of different operating points can share one batch.
    """

    signal: str
    threshold: float
    hits: int = 1
    min_steps: int = 1
    every: int = 1

    @property
    def rule(self) -> Signal:
        return SIGNALS[self.signal]

    @property
    def needs_logits(self) -> bool:
        return self.rule.needs_logits

    def init(self, view: View) -> State:
        features = Features(view, None)
        count = torch.zeros_like(view.step)
        threshold = torch.full_like(features.latent[:, 0], self.threshold)
        return {**features.remember(self.rule.remembers), "hit_count": count, "threshold": threshold}

    def step(self, view: View, state: State) -> tuple[Verdict, State]:
        features = Features(view, state)
        score = self.rule.score(features)
        if view.shared:
            score = pooled(self.rule, score)
        halt, count = passes(self.rule, score, state["threshold"]), state["hit_count"]
        if self.hits > 1 or self.every > 1:  # one row at a time, every operation that is not needed shows in the latency
            checked = view.step % self.every == 0
            count = torch.where(checked, torch.where(halt, count + 1, 0), count)
            halt = checked & (count >= self.hits)
        if self.min_steps > 1:
            halt = halt & (view.step >= self.min_steps)
        memory = {**features.remember(self.rule.remembers), "hit_count": count, "threshold": state["threshold"]}
        return Verdict(halt, score), memory


def passes(rule: Signal, score: Tensor, threshold: Tensor) -> Tensor:
    """Whether each score is on the halting side; NaN is not. score, threshold: [R]."""
    if rule.fires == "below":
        return score <= threshold if rule.closed else score < threshold
    return score >= threshold if rule.closed else score > threshold


def pooled(rule: Signal, score: Tensor) -> Tensor:
    """One score for a prompt that stops as one: latent signals average over its positions, logits count where it ends."""
    return (score[-1:] if rule.needs_logits else score.mean(dim=0, keepdim=True)).expand_as(score)


@dataclass(frozen=True)
class FixedDepth(HaltingPolicy):
    """Every row stops after `depth` steps: the uniform-depth curve."""

    depth: int

    @property
    def needs_logits(self) -> bool:
        return False

    def init(self, view: View) -> State:
        return {}

    def step(self, view: View, state: State) -> tuple[Verdict, State]:
        return Verdict(view.step >= self.depth, torch.full_like(view.latent[:, 0], torch.nan)), state


@dataclass(frozen=True)
class Jointly(HaltingPolicy):
    """One decision for all loops of a model: the rule acts in the first, and a row takes as many steps in each of the others.

    The other loops are not watched, and cost no looks.
    """

    rule: HaltingPolicy

    @property
    def needs_logits(self) -> bool:
        return self.rule.needs_logits

    @property
    def first_loop_only(self) -> bool:
        return True

    def init(self, view: View) -> State:
        return self.rule.init(view)

    def step(self, view: View, state: State) -> tuple[Verdict, State]:
        if view.decided is None:
            return self.rule.step(view, state)
        return Verdict(view.step >= view.decided, torch.full_like(view.latent[:, 0], torch.nan)), state


@dataclass(frozen=True)
class Combined(HaltingPolicy):
    """Several rules at once, over the same row and step. The score is the first rule's."""

    rules: tuple[HaltingPolicy, ...]

    @property
    def needs_logits(self) -> bool:
        return any(rule.needs_logits for rule in self.rules)

    def init(self, view: View) -> State:
        return {f"{i}/{name}": value for i, rule in enumerate(self.rules) for name, value in rule.init(view).items()}

    def _verdicts(self, view: View, state: State) -> tuple[list[Verdict], State]:
        verdicts, merged = [], {}
        for i, rule in enumerate(self.rules):
            own = {name.partition("/")[2]: value for name, value in state.items() if name.startswith(f"{i}/")}
            verdict, after = rule.step(view, own)
            verdicts.append(verdict)
            merged.update({f"{i}/{name}": value for name, value in after.items()})
        return verdicts, merged


@dataclass(frozen=True)
class AnyOf(Combined):
    """Halts at the first step at which any of its rules says so."""

    def step(self, view: View, state: State) -> tuple[Verdict, State]:
        verdicts, after = self._verdicts(view, state)
        return Verdict(torch.stack([v.halt for v in verdicts]).any(dim=0), verdicts[0].score), after


@dataclass(frozen=True)
class AllOf(Combined):
    """Halts at the first step at which all of its rules say so at once."""

    def step(self, view: View, state: State) -> tuple[Verdict, State]:
        verdicts, after = self._verdicts(view, state)
        return Verdict(torch.stack([v.halt for v in verdicts]).all(dim=0), verdicts[0].score), after
