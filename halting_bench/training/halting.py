"""Objectives that teach a model's own halting head: PonderNet and ACT, on probabilities of halting at each step.

Shapes: K steps drawn, `*` positions.
"""

import torch
from torch import Tensor

TINY = 1e-8
"""Below this a probability counts as this much inside a logarithm."""


def exit_distribution(gate: Tensor) -> Tensor:
    """p_k = lambda_k prod_{j<k} (1 - lambda_j), the last step taking what is left (PonderNet, arXiv 2107.05407).

    gate: [K, *] the lambda_k. Returns [K, *], which sums to 1 over K.
    """
    reached = torch.cumprod(1 - gate[:-1], dim=0)
    return torch.cat((gate[:1], reached[:-1] * gate[1:-1], reached[-1:])) if len(gate) > 1 else torch.ones_like(gate)


def geometric_prior(steps: int, success: float) -> Tensor:
    """A geometric distribution cut after `steps` and normalised, float32 [K]."""
    weights = (1 - success) ** torch.arange(steps, dtype=torch.float32)
    return weights / weights.sum()


def ponder_loss(gate: Tensor, losses: Tensor, *, beta: float, prior: float) -> Tensor:
    """PonderNet's objective: the loss expected under the exit distribution, plus beta KL(p || prior); a mean over positions.

    Args:
        gate: [K, *] the lambda_k.
        losses: [K, *] nats, had the position halted at that step.
        beta: weight of the KL divergence.
        prior: the success probability of the geometric prior; about one over the steps that it expects.
    """
    p = exit_distribution(gate)
    before = geometric_prior(len(gate), prior).to(p).view(-1, *[1] * (p.ndim - 1))
    divergence = p * (p.clamp_min(TINY).log() - before.log())
    return ((p * losses).sum(0) + beta * divergence.sum(0)).mean()


def act_weights(gate: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """ACT's weights of the states and its ponder cost (Graves, arXiv 1603.08983, section 2).

    A position halts at the first step N at which its halting probabilities sum to 1 - epsilon, or at K. It weighs step N
    with the remainder R, what the steps before have left of 1, and costs N + R, whose gradient is R's.

    Args:
        gate: [K, *] the halting probabilities h_k.
        epsilon: how much of 1 may be missing.

    Returns:
        (weights [K, *], which sum to 1 over K, and the cost [*]).
    """
    total = gate.cumsum(dim=0)
    runs_on = total < 1 - epsilon
    runs_on[-1] = False
    here = torch.cat((torch.ones_like(runs_on[:1]), runs_on[:-1]))  # N has not come before this step
    remainder = 1 - (total - gate)
    weights = torch.where(runs_on, gate, torch.where(here, remainder, 0.0))
    return weights, here.sum(dim=0) + torch.where(here & ~runs_on, remainder, 0.0).sum(dim=0)
