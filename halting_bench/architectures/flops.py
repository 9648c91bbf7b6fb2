"""FLOPs counted by watching matrix products run, for models that do not say theirs, and to check those that do."""

from typing import Any

import torch
from torch import Tensor

from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.base import Flops, RecurrentModel


class VisibleAttention(DenseContext):
    """Attention as two plain matrix products over all positions, which the counter sees on every device."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[2] // k.shape[2]
        keys, values = (part.repeat_interleave(group, dim=2).transpose(1, 2) for part in (k, v))
        scores = q.transpose(1, 2) @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.causal:
            seen = self.positions[:, None] >= self.positions[None, :]
            scores = scores.masked_fill(~seen, -torch.inf)
        return (scores.softmax(dim=-1) @ values).transpose(1, 2)


def _grouped_product(rows: tuple[int, ...], experts: tuple[int, ...], *_: object, **__: object) -> int:
    """Rows [N, K] against experts [X, K, M], each row meeting one of them."""
    return 2 * rows[0] * rows[1] * experts[2]


def _counter() -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_product})


@torch.no_grad()
def count_stages(model: RecurrentModel, length: int) -> dict[str, float]:
    """FLOPs a row of each stage when every row attends to `length` positions; keys as in `RecurrentModel.costs`."""
    device = next(model.parameters()).device
    tokens = torch.zeros(1, length, dtype=torch.int64, device=device)
    context = VisibleAttention(length, causal=model.spec.causal, device=device)
    counted = {"embed": 0.0, "readout": 0.0}
    with _counter() as counter:
        x = model.embed(tokens, context)
    counted["embed"] = counter.get_total_flops() / length
    for loop in range(len(model.spec.loops)):
        state = model.begin(loop, x, None)
        with _counter() as counter:
            state = model.step(loop, state, x, context)
        counted[f"step/{loop}"] = counter.get_total_flops() / length
        with _counter() as counter:
            x = model.end(loop, state, context)
        last = loop == len(model.spec.loops) - 1
        counted["readout" if last else "embed"] += counter.get_total_flops() / length
    with _counter() as counter:
        model.readout(x, context)
    counted["readout"] += counter.get_total_flops() / length
    return counted


def counted_costs(model: RecurrentModel) -> dict[str, Flops]:
    """The costs of a model that does not state them: the line through the counts at two lengths.

    They are not tiny, for a convolution also computes a few positions of padding, which a short text would overrate.
    """
    short = max(2, min(32, model.spec.max_length // 2))
    long = min(2 * short, model.spec.max_length)
    near, far = count_stages(model, short), count_stages(model, long)
    slope = {stage: (far[stage] - near[stage]) / (long - short) for stage in near}
    return {stage: Flops(near[stage] - slope[stage] * short, slope[stage]) for stage in near}
