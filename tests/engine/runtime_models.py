"""Tiny random models, sequences and thresholds for the laws of the runtime."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import Flops, LoopSpec, ModelSpec, RecurrentModel
from halting_bench.architectures.huginn import Huginn, SandwichBlock, Shape
from halting_bench.benchmarks.base import NOT_SCORED, Sequence
from halting_bench.engine.masked_reference import MaskedReference
from halting_bench.engine.score import Executed, prompt_length
from halting_bench.engine.trace import TracePlan, trace
from halting_bench.halting.policies import FixedDepth, ThresholdPolicy
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.halting.signals import SIGNALS
from halting_bench.records import Outcome

STEPS = 6
VOCAB = 13
LATENT = ("latent-diff", "acceleration", "step-norm-change-rel")
LOGIT = ("kl", "entropy-diff", "argmax-stable")


def tiny_huginn(seed: int = 0, dtype: torch.dtype = torch.float64, head: bool = False) -> Huginn:
    """A 1-2-1 model of width 16 with random weights, large enough that its steps differ; with a halting head if asked."""
    torch.manual_seed(seed)
    config = {
        "n_embd": 16, "n_heads": 2, "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 2, "n_layers_in_coda": 1,
        "intermediate_size": 24, "block_size": 64, "padded_vocab_size": VOCAB, "mean_recurrence": 4, "norm_eps": 1e-6,
        "rope_base": 1000, "qk_bias": True, "init_values": {}, "halting_head": head,
    }  # fmt: skip
    model = Huginn(config).to(dtype).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.4 if "wte" in name else 0.3)
    return model


class TwoLoops(RecurrentModel):
    """Two loops of one block each, with a norm between them; the second starts where the first ended."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        shape = Shape(width=16, heads=2, kv_heads=2, head_width=8, hidden=24, eps=1e-6, qk_bias=False)
        self.spec = ModelSpec("two-loops", 16, VOCAB, 64, 4, (LoopSpec("a", 1, True), LoopSpec("b", 1, False)), 2, 2, 2, 8)
        self.table = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(SandwichBlock(shape) for _ in range(2))
        self.double().eval().requires_grad_(False)

    def embed(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        return self.table(tokens)

    def begin(self, loop: int, x: Tensor, noise: Tensor | None) -> Tensor:
        return x if loop or noise is None else noise.to(x)

    def step(self, loop: int, state: Tensor, x: Tensor, context: AttentionContext) -> Tensor:
        angle = context.positions.to(state).unsqueeze(-1) * torch.tensor([1.0, 0.3, 0.1, 0.03]).to(state)
        return self.blocks[loop](state + x, (torch.polar(torch.ones_like(angle), angle).unsqueeze(-2),), loop, context)

    def end(self, loop: int, state: Tensor, context: AttentionContext) -> Tensor:
        return state * 0.5

    def readout(self, x: Tensor, context: AttentionContext) -> Tensor:
        return x @ self.table.weight.T

    def costs(self) -> dict[str, Flops]:
        return {}


def texts(count: int = 4, seed: int = 0, prompt: int = 0) -> list[Sequence]:
    """Sequences of different lengths, of one document each; the first `prompt` positions are not scored."""
    generator = np.random.default_rng(seed)
    found = []
    for i, length in enumerate(generator.integers(5, 11, count)):
        tokens = generator.integers(0, VOCAB, length + 1)
        targets = tokens[1:].copy()
        targets[:prompt] = NOT_SCORED
        found.append(Sequence(document=i, uid=100 + i, tokens=tokens[:-1], targets=targets))
    return found


def middling(model: RecurrentModel, signal: str, hits: int = 1) -> ThresholdPolicy:
    """A rule whose threshold makes rows of these models exit at many different steps."""
    scores = trace(model, texts(), TracePlan((signal,), STEPS, seed=0))[f"score/{signal}"]
    values = np.unique(scores[np.isfinite(scores)])
    low = int(len(values) * (0.3 if SIGNALS[signal].fires == "below" else 0.6))
    return ThresholdPolicy(signal, float(values[low : low + 2].mean()), hits=hits)


def by_reference(
    model: RecurrentModel, sequences: list[Sequence], policy: HaltingPolicy, **how: object
) -> dict[str, np.ndarray]:
    """What the masked reference says of every scored position."""
    prefill = str(how.pop("prefill", "adaptive"))
    exits, outcomes, losses, never = [], [], [], []
    for sequence in sequences:
        reference = MaskedReference(model, policy, max_steps=STEPS, uid=sequence.uid, **how)  # type: ignore[arg-type]
        prompt = 0 if prefill == "adaptive" else prompt_length(sequence)
        decide = FixedDepth(min(model.spec.mean_recurrence, STEPS)) if prefill == "full" else policy
        rows = reference.feed(sequence.tokens[:prompt].tolist(), shared=True, policy=decide) if prompt else []
        rows += reference.feed(sequence.tokens[prompt:].tolist())
        for row, target in zip(rows, sequence.targets, strict=True):
            if target == NOT_SCORED:
                continue
            exits.append(sum(row.steps))
            outcomes.append(row.outcome)
            never.append(row.outcome is Outcome.EXHAUSTED and not row.fired)
            losses.append(np.nan if row.logits is None else -float(row.logits.log_softmax(-1)[target]))
    return {
        "exit_step": np.array(exits),
        "outcome": np.array(outcomes),
        "loss": np.array(losses),
        "never_fired": np.array(never),
    }


def assert_same(executed: Executed, wanted: dict[str, np.ndarray]) -> None:
    """Decisions exactly, losses to 1e-10."""
    for name in ("exit_step", "outcome", "never_fired"):
        np.testing.assert_array_equal(getattr(executed, name), wanted[name])
    np.testing.assert_allclose(executed.loss, wanted["loss"], rtol=0, atol=1e-10)


@dataclass(frozen=True)
class Reading(ThresholdPolicy):
    """A latent rule that might as well read logits: it must be stepped token by token."""

    @property
    def needs_logits(self) -> bool:
        return True


class RowCounter:
    """Counts the rows that go through each stage of a model."""

    def __init__(self, model: RecurrentModel):
        self.rows = dict.fromkeys(("embed", "step", "readout"), 0)
        for name in self.rows:
            setattr(model, name, self._counting(name, getattr(model, name)))

    def _counting(self, name: str, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(*args: Any) -> Tensor:
            out = method(*args)
            self.rows[name] += len(out)
            return out

        return counted
