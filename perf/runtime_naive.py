"""A decode loop as public early-exit code has it, to measure ours against.

K/V live in a dictionary per (layer, step, position) and are stacked at every layer of every step; the host reads one
number a row and step; a batch goes on until its slowest row halts. Nothing else is made slow: the model code is the same.

Shapes: B rows, D width, P prompt positions.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import RecurrentModel
from halting_bench.halting.policy import HaltingPolicy, View


class DictionaryContext(AttentionContext):
    """Every row stands at the same position."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.step = 0
        self.live: Tensor | None = None  # bool [B, 1, 1], rows that have not halted; None: all

    def stand(self, positions: Tensor) -> None:
        self.positions = positions
        self.first, self.last = int(positions[0]), int(positions[-1])

    def latest(self, layer: int, position: int) -> tuple[Tensor, Tensor]:
        """What a position shows at this step: its own step's K/V, or else its deepest."""
        step = self.step
        while (layer, step, position) not in self.entries:
            step -= 1
        return self.entries[layer, step, position]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The prompt: q [B, P, H, E]. One token: q [B, H, E]."""
        if q.dim() == 4:
            for i in range(q.shape[1]):
                self.entries[layer, self.step, self.first + i] = k[:, i], v[:, i]
            mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
            return mixed.transpose(1, 2)
        if self.live is not None and self.step > 1:
            old_k, old_v = self.latest(layer, self.last)
            k, v = torch.where(self.live, k, old_k), torch.where(self.live, v, old_v)
        self.entries[layer, self.step, self.last] = k, v
        shown = [self.latest(layer, position) for position in range(self.last + 1)]
        keys, values = (torch.stack([entry[i] for entry in shown], dim=2) for i in (0, 1))
        return F.scaled_dot_product_attention(q.unsqueeze(2), keys, values).squeeze(2)


@torch.inference_mode()
def decode_naively(
    model: RecurrentModel, prompts: Tensor, noise: Tensor, policy: HaltingPolicy, *, new_tokens: int, max_steps: int
) -> list[list[int]]:
    """Greedy continuations. The prompt runs at full depth.

    Args:
        model: of one loop.
        prompts: int64 [B, P].
        noise: [B, P + new_tokens, D].
        policy: decides after the prompt.
        new_tokens: of every row.
        max_steps: cap, and the prompt's depth.
    """
    context, length = DictionaryContext(), prompts.shape[1]
    context.stand(torch.arange(length))
    x = model.embed(prompts, context)
    state = model.begin(0, x, noise[:, :length])
    for context.step in range(1, max_steps + 1):
        state = model.step(0, state, x, context)
    context.step = 0
    tokens = [model.readout(model.end(0, state, context), context)[:, -1].argmax(dim=-1)]
    for position in range(length, length + new_tokens - 1):
        context.stand(torch.full((len(prompts),), position))
        context.live = None
        x = model.embed(tokens[-1], context)
        state = model.begin(0, x, noise[:, position])
        exits, halted = state, [False] * len(prompts)
        memory = policy.init(View(torch.zeros(len(prompts), dtype=torch.int64), state, list))  # type: ignore[arg-type]
        for step in range(1, max_steps + 1):
            context.step = step
            state = model.step(0, state, x, context)
            view = View(torch.full((len(prompts),), step), state, list)  # type: ignore[arg-type]
            verdict, memory = policy.step(view, memory)
            running = torch.tensor([not h for h in halted])
            exits = torch.where(running[:, None], state, exits)
            for row in range(len(prompts)):
                halted[row] = halted[row] or bool(verdict.halt[row].item())
            context.live = torch.tensor([not h for h in halted])[:, None, None]
            if all(halted):
                break
        context.step, context.live = 0, None
        tokens.append(model.readout(model.end(0, exits, context), context).argmax(dim=-1))
    return torch.stack(tokens, dim=1).tolist()
