"""FLOPs counted by watching matrix products run, for models that do not say theirs, and to check those that do."""

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


@torch.no_grad()
def count_stages(model: RecurrentModel, length: int) -> dict[str, float]:
    """FLOPs a row of each stage when every row attends to `length` positions; keys as in `RecurrentModel.costs`."""
    from torch.utils.flop_counter import FlopCounterMode

    device = next(model.parameters()).device
    tokens = torch.zeros(1, length, dtype=torch.int64, device=device)
    context = VisibleAttention(length, causal=model.spec.causal, device=device)
    counted = {"embed": 0.0, "readout": 0.0}
    with FlopCounterMode(display=False) as counter:
        x = model.embed(tokens, context)
    counted["embed"] = counter.get_total_flops() / length
    for loop in range(len(model.spec.loops)):
        state = model.begin(loop, x, None)
        with FlopCounterMode(display=False) as counter:
            state = model.step(loop, state, x, context)
        counted[f"step/{loop}"] = counter.get_total_flops() / length
        with FlopCounterMode(display=False) as counter:
            x = model.end(loop, state, context)
        last = loop == len(model.spec.loops) - 1
        counted["readout" if last else "embed"] += counter.get_total_flops() / length
    with FlopCounterMode(display=False) as counter:
        model.readout(x, context)
    counted["readout"] += counter.get_total_flops() / length
    return counted


def counted_costs(model: RecurrentModel) -> dict[str, Flops]:
    """The costs of a model that does not state them, from counts at two lengths."""
    short, long = 2, 4
    near, far = count_stages(model, short), count_stages(model, long)
    slope = {stage: (far[stage] - near[stage]) / (long - short) for stage in near}
    return {stage: Flops(near[stage] - slope[stage] * short, slope[stage]) for stage in near}
