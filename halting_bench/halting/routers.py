"""Learned routers: a probability of stopping read off the latent state, trained on a frozen model's own trajectories.

A linear router or an MLP stops where that probability is high. A gate is linear, too, but takes it for the chance of
halting at this step, given that it has not before, and stops where the chance of having halted by now is high (the exit
rule of Ouro, arXiv 2510.25741, section 3.2).

Beside the state a router may see how it moves: the logarithms of its relative step and of its acceleration.

A router belongs to the weights it was trained on: it is saved with that model's hash and refused on any other.
Shapes: R rows, D width, I inputs (D, or D and the logarithms), H hidden width, K steps (1 when shared by all steps).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halting_bench.errors import UserError
from halting_bench.halting.policy import HaltingPolicy, State, Verdict, View, wide
from halting_bench.halting.signals import SIGNALS, Features

HARD_LABELS = ("converged", "saturated", "improvement")
LABELS = (*HARD_LABELS, "gain")
KINDS = ("linear", "mlp", "gate")
INPUTS: dict[str, tuple[str, ...]] = {"latent": (), "latent+change": ("latent-diff", "acceleration")}
"""What a router looks at -> the signals whose logarithms it sees beside the state."""
TINY = 1e-12
"""Added to a signal before its logarithm: a state at rest has moved by nothing."""


@dataclass(frozen=True, eq=False)
class Router:
    """lambda_k = sigmoid(w_k . x + b_k), or the same after one hidden layer. It says nothing before step `first`."""

    kind: str  # of KINDS
    label: str  # of LABELS: what it was trained to tell
    first: int  # the first step at which its label and its inputs are defined
    model_hash: str
    weight: Tensor  # [K, I] or [K, H]
    bias: Tensor  # [K]
    hidden: Tensor | None = None  # [H, I]
    hidden_bias: Tensor | None = None  # [H]
    inputs: str = "latent"  # of INPUTS

    def logit(self, x: Tensor, step: Tensor) -> Tensor:
        """[R] log-odds of stopping. x: [R, I]; step: int64 [R]; steps beyond the last trained one use that one's."""
        if self.hidden is not None and self.hidden_bias is not None:
            x = F.gelu(F.linear(x, self.hidden.to(x), self.hidden_bias.to(x)))
        at = (step - 1).clamp(0, len(self.bias) - 1)
        return torch.linalg.vecdot(self.weight.to(x)[at], x) + self.bias.to(x)[at]

    @property
    def cumulative(self) -> bool:
        """Whether lambda_k is the chance of halting at step k, and the score that of having halted by then."""
        return self.kind == "gate"

    def probability(self, x: Tensor, step: Tensor) -> Tensor:
        """[R] lambda_k. x: [R, I]; step: int64 [R]; 0 before `first`."""
        return torch.where(step >= self.first, torch.sigmoid(self.logit(x, step)), 0.0)

    def remembers(self) -> tuple[str, ...]:
        """What its signals want to know of the step before."""
        return tuple(sorted({name for signal in INPUTS[self.inputs] for name in SIGNALS[signal].remembers}))

    def flops(self) -> int:
        """FLOPs of one row and step."""
        first = self.weight if self.hidden is None else self.hidden
        width = first.shape[1] - len(INPUTS[self.inputs])
        signals = sum(SIGNALS[name].flops(width, vocab=0) for name in INPUTS[self.inputs])
        hidden = 0 if self.hidden is None else 2 * self.hidden.numel()
        return signals + hidden + 2 * self.weight.shape[1]


def router_inputs(latent: Tensor, signals: list[Tensor]) -> Tensor:
    """[*, I] of the states [*, D] and of the signals [*] that INPUTS names, in its order."""
    return torch.cat((latent, *((signal + TINY).log().unsqueeze(-1) for signal in signals)), dim=-1)


@dataclass(frozen=True)
class RouterPolicy(HaltingPolicy):
    """Halts when a router's probability exceeds a threshold, or a gate's cumulative one reaches it.

    The score at step k is lambda_k, or 1 - prod_{first <= j <= k} (1 - lambda_j) of a gate.
    """

    router: Router
    threshold: float

    @property
    def needs_logits(self) -> bool:
        return False

    def init(self, view: View) -> State:
        threshold = torch.full_like(wide(view.latent[:, 0]), self.threshold)
        survival = {"survival": torch.ones_like(threshold)} if self.router.cumulative else {}
        return {"threshold": threshold} | survival | Features(view, None).remember(self.router.remembers())

    def step(self, view: View, state: State) -> tuple[Verdict, State]:
        features = Features(view, state)
        signals = [SIGNALS[name].score(features) for name in INPUTS[self.router.inputs]]
        score = self.router.probability(router_inputs(features.latent, signals), view.step)
        state = state | features.remember(self.router.remembers())
        if self.router.cumulative:
            state["survival"] = state["survival"] * (1 - score)
            score = 1 - state["survival"]
        score = torch.where(view.step >= self.router.first, score, torch.nan)
        halt = score >= state["threshold"] if self.router.cumulative else score > state["threshold"]
        return Verdict(halt, score), state


def save_router(router: Router, path: Path, report: dict[str, Any]) -> None:
    """Writes a router and the figures of its training to one safetensors file."""
    from safetensors.torch import save_file

    tensors = {"weight": router.weight, "bias": router.bias, "hidden": router.hidden, "hidden_bias": router.hidden_bias}
    told = {name: getattr(router, name) for name in ("kind", "label", "first", "model_hash", "inputs")}
    told |= {"report": report}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, partial, metadata={"router": json.dumps(told)})
    partial.replace(path)


def load_router(path: Path) -> Router:
    """Reads a router; whoever uses it checks its `model_hash`. Raises UserError when the file is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            told = json.loads((file.metadata() or {})["router"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
        inputs = told.get("inputs", "latent")  # the first routers saw nothing else, and did not say so
        for what, value, known in (("kind", told["kind"], KINDS), ("inputs", inputs, INPUTS)):
            if value not in known:
                raise ValueError(f"its {what} is {value!r}, this version knows {', '.join(known)}")
        return Router(told["kind"], told["label"], int(told["first"]), told["model_hash"], inputs=inputs, **tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a router ({error}): make one with halting-bench train-router") from None
