"""What goes into the slots, and what comes out.

Shapes: P prompt tokens, M new tokens, T positions that were run, L loops.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from halting_bench.records import Outcome


@dataclass(frozen=True)
class Request:
    """One sequence to decode: a prompt and how many tokens to add; or a given text to score (`targets`)."""

    uid: int  # seeds the initial states and the draws
    tokens: np.ndarray  # int64 [P]
    max_new_tokens: int = 0
    targets: np.ndarray | None = None  # int64 [P], the token that each readout must predict, or NOT_SCORED
    prefill: int = 0  # leading tokens that run as one prompt before the rest is stepped token by token
    threshold: float | None = None  # this sequence's own operating point, instead of the policy's
    ends: Callable[[list[int]], bool] | None = None  # whether the new tokens so far end it, beside the stop tokens

    @property
    def key(self) -> tuple[int, float | None]:
        """What tells it from the others: one uid may run at several operating points, from the same initial states."""
        return self.uid, self.threshold

    def as_prompt(self, tokens: int) -> "Request":
        """The same sequence, its leading tokens run as one prompt; 0: all of them stepped one by one."""
        return replace(self, prefill=tokens)


@dataclass(frozen=True)
class Decoded:
    """A finished sequence. Steps are core applications, all loops together; a token's are those of the row that made it."""

    uid: int
    tokens: list[int]  # new ones, the stop token included
    steps: list[int]  # [M]
    outcomes: list[Outcome]  # [M]
    prompt_steps: list[int]  # [P]
    prompt_outcomes: list[Outcome]
    stopped: str  # "length", "stop" (a stop token came) or "nonfinite" (the state broke: no token)
    loop_steps: list[list[int]]  # [M][L], `steps` loop by loop
    fired: list[bool]  # [M], whether the rule held where the token's row stopped
    threshold: float | None = field(default=None, compare=False)  # the request's own: one way of naming an operating point


@dataclass
class Progress:
    """A sequence on its way through a slot."""

    request: Request
    slot: int
    position: int = 0
    steps: list[list[int]] = field(default_factory=list)  # [T][L]
    outcomes: list[Outcome] = field(default_factory=list)  # [T]
    fired: list[bool] = field(default_factory=list)  # [T]
    loss: np.ndarray | None = None  # float64 [P], NaN where not scored
    correct: np.ndarray | None = None  # bool [P]
    newest: int | None = None  # the last token drawn, where stop tokens make the host look
    tokens: list[int] = field(default_factory=list)
    stopped: str = ""

    def generates_after(self, position: int) -> bool:
        """Whether the row at this position makes a new token, rather than being followed by a given one."""
        return position + 1 >= len(self.request.tokens) and self.request.max_new_tokens > 0

    def told_to_stop(self, stop: frozenset[int]) -> bool:
        """Whether the newest token ends the sequence: it is a stop token, or the request says so."""
        return self.newest in stop or (self.request.ends is not None and self.request.ends(self.tokens))

    def ends_after(self, position: int) -> bool:
        """Whether nothing is left to run after the row at this position (a stop token aside)."""
        return position + 1 >= len(self.request.tokens) + max(self.request.max_new_tokens - 1, 0)

    def decoded(self) -> Decoded:
        """The public result. The last prompt row makes the first new token."""
        prompt, depths = len(self.request.tokens), [sum(row) for row in self.steps]
        new = slice(prompt - 1, prompt - 1 + len(self.tokens))
        return Decoded(
            uid=self.request.uid,
            tokens=self.tokens,
            steps=depths[new],
            outcomes=self.outcomes[new],
            prompt_steps=depths[:prompt],
            prompt_outcomes=self.outcomes[:prompt],
            stopped=self.stopped,
            loop_steps=self.steps[new],
            fired=self.fired[new],
            threshold=self.request.threshold,
        )
