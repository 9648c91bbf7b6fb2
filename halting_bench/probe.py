"""Runs one model on a few random tokens in different ways that must agree. `doctor` and the tests of every family use it.

Shapes: B, T a batch; D width; V vocabulary; R the trained number of loops.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from halting_bench.architectures.attention import AttentionContext, DenseContext
from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.noise import initial_noise


class GrowingCache(AttentionContext):
    """One position at a time over the K/V of all earlier ones: the simplest cache there can be.

    Every forward of a position makes the same calls in the same order, so a call's number is its slot: no family has to
    say which loop and layer it is.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.at(0)

    def at(self, position: int) -> "GrowingCache":
        """Itself, about to run one position of every sequence."""
        self.positions = torch.tensor([position], device=self.device)
        self.call = 0
        return self

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [B, 1, H, E]; k, v: [B, 1, G, E]."""
        if self.call == len(self.kept):
            self.kept.append((k, v))
        else:
            old = self.kept[self.call]
            self.kept[self.call] = (torch.cat((old[0], k), dim=1), torch.cat((old[1], v), dim=1))
        keys, values = (part.transpose(1, 2) for part in self.kept[self.call])
        self.call += 1
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=q.shape[2] != k.shape[2])
        return mixed.transpose(1, 2)


class Probe:
    """A model, two random sequences, and the initial noise that goes with them."""

    def __init__(self, model: RecurrentModel, *, tokens: int, depths: int | None = None, seed: int = 0):
        """Args: tokens: T, cut to what the model takes. depths: look at 1..depths; none: at all that were trained."""
        self.model, self.spec = model, model.spec
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        length = min(tokens, self.spec.max_length)
        drawn = np.random.default_rng(seed).integers(0, self.spec.vocab_size, (2, length))
        self.tokens = torch.from_numpy(drawn).to(self.device)
        self.depths = min(depths or self.spec.mean_recurrence, self.spec.mean_recurrence)
        self.noise: Tensor | None = None
        if any(loop.random_start for loop in self.spec.loops):
            self.noise = initial_noise(seed, np.arange(2)[:, None], np.arange(length)[None], self.spec.width).to(self.device)

    def run(self, tokens: Tensor, context: AttentionContext, noise: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """(last state, logits) at each depth 1..depths, the same in every loop. tokens: [B, T]."""
        model, results = self.model, []
        if len(self.spec.loops) == 1:  # one pass shows every depth
            x = model.embed(tokens, context)
            state = model.begin(0, x, noise)
            for _ in range(self.depths):
                state = model.step(0, state, x, context)
                results.append((state, model.readout(model.end(0, state, context), context)))
            return results
        for depth in range(1, self.depths + 1):
            x = model.embed(tokens, context)
            for loop in range(len(self.spec.loops)):
                state = model.begin(loop, x, noise)
                for _ in range(depth):
                    state = model.step(loop, state, x, context)
                x = model.end(loop, state, context)
            results.append((state, model.readout(x, context)))
        return results

    def dense(self, *, rows: int = 2, length: int | None = None, real: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """(state, logits) at each depth without a cache, of the first sequences, cut to `length`, `real` tokens not padding."""
        length = length or self.tokens.shape[1]
        lengths = None if real is None else torch.full((rows,), real, device=self.device)
        context = DenseContext(length, causal=self.spec.causal, lengths=lengths, device=self.device)
        noise = None if self.noise is None else self.noise[:rows, :length]
        return self.run(self.tokens[:rows, :length], context, noise)

    def cached(self) -> list[Tensor]:
        """Logits [B, T, V] at each depth, one position at a time."""
        cache, pieces = GrowingCache(self.device), []
        for t in range(self.tokens.shape[1]):
            noise = None if self.noise is None else self.noise[:, t : t + 1]
            pieces.append([logits for _, logits in self.run(self.tokens[:, t : t + 1], cache.at(t), noise)])
        return [torch.cat([piece[k] for piece in pieces], dim=1) for k in range(self.depths)]

    def weights_by_step(self) -> tuple[set[int], set[int]]:
        """Storage addresses of the parameters that the first, and the second, step of the first loop touches."""
        context = DenseContext(self.tokens.shape[1], causal=self.spec.causal, device=self.device)
        x = self.model.embed(self.tokens, context)
        state = self.model.begin(0, x, self.noise)
        touched: set[int] = set()

        def enter(module: torch.nn.Module, _: object) -> None:
            touched.update(p.data_ptr() for p in module.parameters(recurse=False))

        handles = [module.register_forward_pre_hook(enter) for module in self.model.modules()]
        seen = []
        try:
            for _ in range(2):
                touched.clear()
                state = self.model.step(0, state, x, context)
                seen.append(set(touched))
        finally:
            for handle in handles:
                handle.remove()
        return seen[0], seen[1]


def relative_gap(ours: list[Tensor], theirs: list[Tensor]) -> tuple[float, int]:
    """The largest difference, relative to the largest entry, over depths; and the depth (1-based) that has it."""
    gaps = np.array([_gap(a, b) for a, b in zip(ours, theirs, strict=True)])
    worst = int(np.argmax(np.where(np.isnan(gaps), np.inf, gaps)))
    return float(gaps[worst]), worst + 1


def _gap(a: Tensor, b: Tensor) -> float:
    scale = float(b.abs().max())
    return float((a - b).abs().max()) / (scale or 1.0)
