"""Trains routers on labels harvested from a frozen model's own trajectories.

Shapes: N rows, R = max_steps, D width.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.base import Benchmark
from halting_bench.diagnosis import record_orbits
from halting_bench.engine.trace import Shard, TracePlan, trace
from halting_bench.errors import UserError, unknown_name
from halting_bench.halting.routers import HARD_LABELS, INPUTS, KINDS, LABELS, Router, router_inputs
from halting_bench.halting.signals import SIGNALS
from halting_bench.records import Metric

FREE_RULES = {"latent-diff": 1, "acceleration": 2, "kl": 1, "argmax-stable": 1, "entropy": 1, "margin": 1}
"""Signals and hits of the rules that routers are compared with."""

RATES = {"linear": 0.05, "mlp": 0.01, "gate": 0.05}
"""Learning rates: a linear router that separates its label well needs large weights to say so."""

USUAL_LABELS = {"linear": HARD_LABELS, "mlp": HARD_LABELS, "gate": ("gain",)}
"""What each kind is trained to tell unless one says otherwise."""

SLOPE, USUAL_GAIN = 50.0, 0.005
"""Ouro's second stage (arXiv 2510.25741, section 3.4): going on is right with sigmoid(SLOPE (nats gained - USUAL_GAIN))."""

BINS = 10


@dataclass(frozen=True)
class RouterRecipe:
    """How a router is trained. `epsilon` is the KL of "converged", `delta` the nats of "improvement"."""

    kind: str
    label: str
    shared: bool = True
    inputs: str = "latent"
    epsilon: float = 1e-3
    delta: float = 0.01
    steps: int = 600
    batch: int = 4096
    decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        known = (
            ("router kind", self.kind, KINDS),
            ("router label", self.label, LABELS),
            ("router inputs", self.inputs, INPUTS),
        )
        for what, value, names in known:
            if value not in names:
                raise unknown_name(what, value, names)

    @property
    def name(self) -> str:
        """What its router is called."""
        change = "" if self.inputs == "latent" else "-change"
        return f"router-{self.kind}-{self.label}{change}" + ("" if self.shared else "-per-step")


@dataclass(frozen=True)
class Harvest:
    """States and outcomes of every scored position of one split."""

    latent: np.ndarray  # float32 [N, R, D]
    shard: Shard
    metric: Metric

    @property
    def outcome(self) -> np.ndarray:
        """The metric's per-token value at each depth, float64 [N, R]."""
        if self.metric is Metric.ACCURACY:
            return self.shard["correct"].astype(np.float64)
        return self.shard["loss"].astype(np.float64) / np.log(2)

    def inputs(self, name: str) -> Tensor:
        """What a router of these inputs looks at, float32 [N, R, I]; NaN at steps where a signal has no score."""
        signals = [torch.from_numpy(self.shard[f"score/{signal}"]) for signal in INPUTS[name]]
        return router_inputs(torch.from_numpy(self.latent), signals)


def harvest(model: RecurrentModel, benchmark: Benchmark, documents: list[int], *, max_steps: int, seed: int = 0) -> Harvest:
    """Runs documents to full depth and keeps every state. Raises UserError for a model of several loops."""
    if len(model.spec.loops) > 1:
        raise UserError(f"a router looks at one loop, and this {model.spec.family} model has {len(model.spec.loops)}")
    sequences = [sequence for document in documents for sequence in benchmark.sequences(document)]
    shard = trace(model, sequences, TracePlan(tuple(FREE_RULES), max_steps, seed))
    rows = len(shard["document"])
    parts = [sequences[i : i + 64] for i in range(0, len(sequences), 64)]
    latents = [record_orbits(model, part, steps=max_steps, seed=seed, rows=rows).loops[0][:, 1:] for part in parts]
    return Harvest(np.concatenate(latents).astype(np.float32), shard, benchmark.metric)


def labels_of(found: Harvest, recipe: RouterRecipe) -> tuple[np.ndarray, int]:
    """(label, first step): float32 [N, R], 1 where stopping is right, NaN where the label is not defined; "gain" is in 0..1."""
    steps = found.latent.shape[1]
    if recipe.label == "converged":  # of two successive outputs: the first step has none before it
        kl = found.shard["score/kl"]
        return np.where(np.isnan(kl), np.nan, kl < recipe.epsilon).astype(np.float32), 2
    if recipe.label == "gain":  # soft: a step that gains little is likely, not certain, to be the last one wanted
        loss = found.shard["loss"].astype(np.float64)
        gained = np.maximum(loss[:, :-1] - loss[:, 1:], 0)
        stop = 1 / (1 + np.exp(SLOPE * (gained - USUAL_GAIN)))
        return np.concatenate((np.full((len(loss), 1), np.nan), stop), axis=1).astype(np.float32), 2
    if recipe.label == "saturated":
        return (np.arange(1, steps + 1) >= found.shard["saturation"][:, None]).astype(np.float32), 1
    loss = found.shard["loss"].astype(np.float64)
    best_later = np.minimum.accumulate(loss[:, ::-1], axis=1)[:, ::-1]
    best_later = np.concatenate((best_later[:, 1:], np.full((len(loss), 1), np.inf)), axis=1)
    return (best_later >= loss - recipe.delta).astype(np.float32), 1


def fit(found: Harvest, recipe: RouterRecipe, model_hash: str) -> Router:
    """Class-balanced logistic regression on standardised states, at every (row, step) where the label is defined.

    The balance moves the intercept by the log-odds of the label; it is moved back, so that the output is a probability.
    The soft label is not balanced, as in Ouro.
    """
    label, first = labels_of(found, recipe)
    inputs = found.inputs(recipe.inputs)
    seen = inputs.isfinite().all(-1).numpy()
    row, step = np.nonzero(seen & ~np.isnan(label))
    _, steps, width = inputs.shape
    first = max(first, *(SIGNALS[name].first for name in INPUTS[recipe.inputs]), 1)
    if not len(row):
        raise UserError("no state of this model is finite where the router is to learn: type halting-bench doctor MODEL")
    rate = float(label[row, step].mean())
    if not 0 < rate < 1:
        raise UserError(f"label '{recipe.label}' is {rate:g} everywhere: nothing to learn; choose another label or epsilon")
    flat = inputs.numpy()[seen]
    centre, scale = torch.from_numpy(flat.mean(0)), torch.from_numpy(flat.std(0) + 1e-6)
    generator = torch.Generator().manual_seed(recipe.seed)
    heads = 1 if recipe.shared else steps
    hidden = nn.Linear(width, 4 * width) if recipe.kind == "mlp" else None
    features = width if hidden is None else 4 * width
    weight, bias = nn.Parameter(torch.zeros(heads, features)), nn.Parameter(torch.zeros(heads))
    parameters = [weight, bias]
    if hidden is not None:
        nn.init.normal_(hidden.weight, std=width**-0.5, generator=generator)
        nn.init.zeros_(hidden.bias)
        nn.init.normal_(weight, std=0.1 * features**-0.5, generator=generator)
        parameters += list(hidden.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATES[recipe.kind], weight_decay=recipe.decay)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=recipe.steps)
    balance = torch.tensor(1.0 if recipe.label == "gain" else (1 - rate) / rate)
    wanted = torch.from_numpy(label)
    for _ in range(recipe.steps):
        chosen = torch.randint(len(row), (recipe.batch,), generator=generator).numpy()
        rows, at = torch.from_numpy(row[chosen]), torch.from_numpy(step[chosen])
        x = (inputs[rows, at] - centre) / scale
        x = x if hidden is None else F.gelu(hidden(x))
        head = at.clamp(max=heads - 1)
        logit = torch.linalg.vecdot(weight[head], x) + bias[head]
        loss = F.binary_cross_entropy_with_logits(logit, wanted[rows, at], pos_weight=balance)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return _folded(recipe, first, model_hash, weight, bias - balance.log(), hidden, centre, scale)


def _folded(
    recipe: RouterRecipe,
    first: int,
    model_hash: str,
    weight: Tensor,
    bias: Tensor,
    hidden: nn.Linear | None,
    centre: Tensor,
    scale: Tensor,
) -> Router:
    """The standardisation put into the first layer."""
    if hidden is None:
        scaled = weight / scale
        return Router(
            recipe.kind, recipe.label, first, model_hash, scaled.detach(), (bias - scaled @ centre).detach(),
            inputs=recipe.inputs,
        )  # fmt: skip
    inner = hidden.weight / scale
    return Router(
        recipe.kind, recipe.label, first, model_hash, weight.detach().clone(), bias.detach(), inner.detach(),
        (hidden.bias - inner @ centre).detach(), recipe.inputs,
    )  # fmt: skip


@torch.no_grad()
def router_scores(router: Router, found: Harvest) -> np.ndarray:
    """What the router's policy compares with a threshold, float32 [N, R]; NaN before the router's first step."""
    scores = probabilities(router, found)
    if router.cumulative:
        survival = np.ones(len(scores), np.float32)
        for k in range(scores.shape[1]):
            survival = survival * (1 - scores[:, k])
            scores[:, k] = 1 - survival
    scores[:, : router.first - 1] = np.nan
    return scores


@torch.no_grad()
def probabilities(router: Router, found: Harvest) -> np.ndarray:
    """lambda_k of every row and step, float32 [N, R]; 0 before the router's first step."""
    inputs = found.inputs(router.inputs)
    step = torch.arange(1, inputs.shape[1] + 1).expand(len(inputs), -1)
    return router.probability(inputs.flatten(0, 1), step.flatten()).view_as(step).numpy()


def auroc(score: np.ndarray, label: np.ndarray) -> float:
    """Probability that a positive scores above a negative, ties counting half; NaN without both. Both arrays flat."""
    from scipy.stats import rankdata

    positive = label > 0.5
    count, other = int(positive.sum()), int((~positive).sum())
    if not count or not other:
        return float("nan")
    return float((rankdata(score)[positive].sum() - count * (count + 1) / 2) / (count * other))


def calibration_error(score: np.ndarray, label: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error over bins of equal width: mean |stated probability - observed rate|."""
    place = np.minimum((score * bins).astype(int), bins - 1)
    count = np.bincount(place, minlength=bins)
    stated, seen = np.bincount(place, score, minlength=bins), np.bincount(place, label, minlength=bins)
    return float(np.abs(stated - seen).sum() / count.sum())


def quality_of(router: Router, found: Harvest, recipe: RouterRecipe) -> dict[str, float]:
    """AUROC, calibration error and label rate over every (row, step) where the label is defined.

    All of lambda_k, also of a gate. A soft label counts as positive above one half for AUROC; the calibration error
    compares with its mean and the label rate is its mean.
    """
    label, _ = labels_of(found, recipe)
    stated, known = probabilities(router, found), ~np.isnan(label)
    known[:, : router.first - 1] = False
    return {
        "auroc": auroc(stated[known], label[known]),
        "calibration_error": calibration_error(stated[known], label[known]),
        "label_rate": float(label[known].mean()),
    }
