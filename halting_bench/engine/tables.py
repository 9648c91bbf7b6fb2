"""What the slots hold, one row a slot, all of it preallocated: tokens, initial noise, draws, answers and the K/V cache.

Shapes: S slots, T positions, D width, V vocabulary, R rows.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.noise import initial_noise
from halting_bench.benchmarks.base import NOT_SCORED
from halting_bench.engine.kv_cache import KvMode, Workspace
from halting_bench.engine.requests import Progress, Request
from halting_bench.engine.sampling import Sampling
from halting_bench.halting.policy import wide


@dataclass(frozen=True)
class Plan:
    """How sequences are run."""

    slots: int
    length: int  # T, tokens a slot can hold
    max_steps: int
    mode: KvMode
    prefill: str  # adaptive, full or shared
    seed: int
    sampling: Sampling
    stop: frozenset[int]
    scoring: bool = False  # requests have targets
    spare: bool = False  # keep one more K/V slot, for the rows that fill up a fixed shape
    workspace: Workspace | None = None

    def with_slots(self, slots: int) -> "Plan":
        """The same with another number of slots."""
        return replace(self, slots=slots)


class Tables:
    """Storage by slot."""

    def __init__(self, model: RecurrentModel, plan: Plan):
        like = next(model.parameters())
        self.model, self.plan, self.device = model, plan, like.device
        shape, spec = (plan.slots, plan.length), model.spec
        planes = plan.mode.planes(plan.max_steps)
        workspace = Workspace() if plan.workspace is None else plan.workspace
        self.cache = workspace.take(spec, plan.slots + plan.spare, plan.length, planes, plan.mode, like)
        self.text = torch.zeros(shape, dtype=torch.int64, device=self.device)
        drawn = any(loop.random_start for loop in spec.loops)
        self.noise = torch.zeros(*shape, spec.width, dtype=like.dtype, device=self.device) if drawn else None
        self.uniforms = None if plan.sampling.greedy else torch.zeros(shape, dtype=torch.float64, device=self.device)
        if plan.scoring:
            self.gold = torch.zeros(shape, dtype=torch.int64, device=self.device)
            self.loss = torch.zeros(shape, dtype=torch.float64, device=self.device)
            self.correct = torch.zeros(shape, dtype=torch.bool, device=self.device)

    def admit(self, request: Request, slot: int) -> Progress:
        """Gives a slot to a sequence."""
        prompt, length = len(request.tokens), len(request.tokens) + max(request.max_new_tokens - 1, 0)
        self.cache.release(slot)
        self.text[slot, :prompt] = torch.from_numpy(np.asarray(request.tokens, np.int64)).to(self.device)
        if self.noise is not None:
            noise = initial_noise(self.plan.seed, np.asarray(request.uid), np.arange(length), self.model.spec.width)
            self.noise[slot, :length] = noise.to(self.noise)
        if self.uniforms is not None and request.max_new_tokens:
            draws = self.plan.sampling.uniforms(request.uid, request.max_new_tokens).to(self.device)
            self.uniforms[slot, prompt - 1 : length] = draws
        if request.targets is not None:
            self.gold[slot, :prompt] = torch.from_numpy(np.asarray(request.targets, np.int64)).to(self.device)
            self.loss[slot], self.correct[slot] = torch.nan, False
        return Progress(request, slot)

    def start_noise(self, slots: Tensor, positions: Tensor) -> Tensor | None:
        """[R, D] of the rows, or None when no loop of the model starts from noise."""
        return None if self.noise is None else self.noise.flatten(0, 1).index_select(0, slots * self.plan.length + positions)

    def answer(
        self, slots: Tensor, positions: Tensor, logits: Tensor, generating: Tensor | None, drawing: list[Progress]
    ) -> None:
        """Takes readouts: keeps losses of given targets and puts drawn tokens where the slot's next position reads them.

        The host looks at the drawn tokens only when there are stop tokens, or a request that decides by its text.

        Args:
            slots, positions: int64 [R] of the rows.
            logits: [R, V].
            generating: indices of the rows whose next token is drawn; None: all of them.
            drawing: the sequences of those rows.
        """
        if self.plan.scoring:
            gold = self.gold[slots, positions]
            log_p = torch.log_softmax(wide(logits), dim=-1).gather(1, gold.clamp(min=0)[:, None])[:, 0]
            scored = gold != NOT_SCORED
            self.loss[slots, positions] = torch.where(scored, -log_p, torch.nan).double()
            self.correct[slots, positions] = scored & (wide(logits).argmax(dim=-1) == gold)
        if not drawing:
            return
        if generating is not None:
            slots, positions, logits = slots[generating], positions[generating], logits[generating]
        uniforms = None if self.uniforms is None else self.uniforms[slots, positions]
        tokens = self.plan.sampling.draw(logits, uniforms)
        self.text[slots, positions + 1] = tokens
        if self.plan.stop or any(progress.request.ends for progress in drawing):
            for progress, token in zip(drawing, tokens.tolist(), strict=True):
                progress.newest = token
                progress.tokens.append(token)

    def collect(self, progress: Progress, last: int | None) -> None:
        """Reads a finished sequence's answers. last: the last position that a token was drawn for; None when none was."""
        request, slot = progress.request, progress.slot
        if request.targets is not None:
            progress.loss = self.loss[slot, : len(request.tokens)].cpu().numpy()
            progress.correct = self.correct[slot, : len(request.tokens)].cpu().numpy()
        if last is not None:
            progress.tokens = self.text[slot, len(request.tokens) : last + 2].tolist()
