"""Trains routers on labels harvested from a frozen model's own trajectories, and sets them beside the free rules.

Documents are split in three: routers are trained on one part, thresholds chosen on the next, and everything is reported on
the last. All rules see the same states. Shapes: N rows, R = max_steps, D width, M documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halting_bench.analysis.statistics import mean_interval, paired_difference
from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.base import Benchmark
from halting_bench.diagnosis import record_orbits
from halting_bench.engine.replay import Rule, exits_at, running_extremum, unsigned_threshold
from halting_bench.engine.trace import Shard, TracePlan, trace
from halting_bench.errors import UserError, unknown_name
from halting_bench.halting.routers import KINDS, LABELS, Router
from halting_bench.halting.signals import SIGNALS
from halting_bench.records import Metric

FREE_RULES = {"latent-diff": 1, "acceleration": 2, "kl": 1, "argmax-stable": 1, "entropy": 1, "margin": 1}
"""Signals and hits of the rules that routers are compared with."""

RATES = {"linear": 0.05, "mlp": 0.01}
"""Learning rates: a linear router that separates its label well needs large weights to say so."""

BINS = 10
CANDIDATES = 400


@dataclass(frozen=True)
class RouterRecipe:
    """How a router is trained. `epsilon` is the KL of "converged", `delta` the nats of "improvement"."""

    kind: str
    label: str
    shared: bool = True
    epsilon: float = 1e-3
    delta: float = 0.01
    steps: int = 600
    batch: int = 4096
    decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for what, value, known in (("router kind", self.kind, KINDS), ("router label", self.label, LABELS)):
            if value not in known:
                raise unknown_name(what, value, known)


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
    """(label, first step): float32 [N, R], 1 where stopping is right, NaN where the label is not defined."""
    steps = found.latent.shape[1]
    if recipe.label == "converged":  # of two successive outputs: the first step has none before it
        kl = found.shard["score/kl"]
        return np.where(np.isnan(kl), np.nan, kl < recipe.epsilon).astype(np.float32), 2
    if recipe.label == "saturated":
        return (np.arange(1, steps + 1) >= found.shard["saturation"][:, None]).astype(np.float32), 1
    loss = found.shard["loss"].astype(np.float64)
    best_later = np.minimum.accumulate(loss[:, ::-1], axis=1)[:, ::-1]
    best_later = np.concatenate((best_later[:, 1:], np.full((len(loss), 1), np.inf)), axis=1)
    return (best_later >= loss - recipe.delta).astype(np.float32), 1


def fit(found: Harvest, recipe: RouterRecipe, model_hash: str) -> Router:
    """Class-balanced logistic regression on standardised states, at every (row, step) where the label is defined.

    The balance moves the intercept by the log-odds of the label; it is moved back, so that the output is a probability.
    """
    label, first = labels_of(found, recipe)
    row, step = np.nonzero(~np.isnan(label))
    steps, width = found.latent.shape[1:]
    rate = float(label[row, step].mean())
    if not 0 < rate < 1:
        raise UserError(f"label '{recipe.label}' is {rate:g} everywhere: nothing to learn; choose another label or epsilon")
    flat = found.latent.reshape(-1, width)
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
    balance = torch.tensor((1 - rate) / rate)
    latent, wanted = torch.from_numpy(found.latent), torch.from_numpy(label)
    for _ in range(recipe.steps):
        chosen = torch.randint(len(row), (recipe.batch,), generator=generator).numpy()
        rows, at = torch.from_numpy(row[chosen]), torch.from_numpy(step[chosen])
        x = (latent[rows, at] - centre) / scale
        x = x if hidden is None else F.gelu(hidden(x))
        head = at.clamp(max=heads - 1)
        logit = torch.linalg.vecdot(weight[head], x) + bias[head]
        loss = F.binary_cross_entropy_with_logits(logit, wanted[rows, at], pos_weight=balance)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    shift = float(np.log(rate / (1 - rate)))
    with torch.no_grad():
        return _folded(recipe, first, model_hash, weight, bias + shift, hidden, centre, scale)


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
        return Router(recipe.kind, recipe.label, first, model_hash, scaled.detach(), (bias - scaled @ centre).detach())
    inner = hidden.weight / scale
    return Router(
        recipe.kind, recipe.label, first, model_hash, weight.detach().clone(), bias.detach(), inner.detach(),
        (hidden.bias - inner @ centre).detach(),
    )  # fmt: skip


@torch.no_grad()
def router_scores(router: Router, found: Harvest) -> np.ndarray:
    """Probabilities of stopping, float32 [N, R]; NaN before the router's first step."""
    rows, steps, _ = found.latent.shape
    scores = np.full((rows, steps), np.nan, np.float32)
    for k in range(router.first, steps + 1):
        logit = router.logit(torch.from_numpy(found.latent[:, k - 1]), torch.full((rows,), k))
        scores[:, k - 1] = torch.sigmoid(logit).numpy()
    return scores


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
    """AUROC, calibration error and label rate over every (row, step) where the label is defined."""
    label, _ = labels_of(found, recipe)
    score = router_scores(router, found)
    known = ~np.isnan(label) & ~np.isnan(score)
    return {
        "auroc": auroc(score[known], label[known]),
        "calibration_error": calibration_error(score[known], label[known]),
        "label_rate": float(label[known].mean()),
    }


def compare(calibration: Harvest, test: Harvest, routers: dict[str, Router], trained: int) -> list[dict[str, Any]]:
    """Every rule at its cheapest threshold of equal quality: chosen on `calibration`, reported on `test`.

    Args:
        calibration, test: different documents.
        routers: by name.
        trained: the trained depth; full-depth quality is that of the uniform depth.

    Returns:
        One row a rule, dearest first: mean_depth and its interval, quality, and difference to full depth with a paired
        interval over documents. A rule that reaches no equal quality has threshold None.
    """
    rows = [_uniform_row(calibration, test, trained), _saturation_row(test, trained)]
    for name, rule, scores in _rules(calibration, test, routers):
        rows.append({"rule": name} | _chosen(calibration, test, scores, rule, trained))
    return sorted(rows, key=lambda row: -row["mean_depth"])


def _rules(
    calibration: Harvest, test: Harvest, routers: dict[str, Router]
) -> Iterator[tuple[str, Rule, tuple[np.ndarray, np.ndarray]]]:
    for name, hits in FREE_RULES.items():
        signal = SIGNALS[name]
        both = (calibration.shard[f"score/{name}"], test.shard[f"score/{name}"])
        yield name, Rule(name, signal.fires, signal.closed, hits), both
    for name, router in routers.items():
        yield name, Rule(name, "above"), (router_scores(router, calibration), router_scores(router, test))


def _sign(metric: Metric) -> int:
    return 1 if metric.higher_is_better else -1


def _enough(outcome: np.ndarray, found: Harvest, trained: int) -> bool:
    """Whether outcomes [N] are as good as full depth's, within the metric's tolerance."""
    full = found.outcome[:, trained - 1].mean()
    return bool(_sign(found.metric) * (outcome.mean() - full) >= -found.metric.tolerance)


def _chosen(
    calibration: Harvest, test: Harvest, scores: tuple[np.ndarray, np.ndarray], rule: Rule, trained: int
) -> dict[str, Any]:
    extremum, rows = running_extremum(scores[0], rule), np.arange(len(calibration.latent))
    finite = np.unique(extremum[np.isfinite(extremum)])
    bounds = finite[np.unique(np.linspace(0, len(finite) - 1, CANDIDATES).astype(int))] if len(finite) else finite
    steps = extremum.shape[1]
    for bound in bounds[::-1]:  # the loosest first
        exits = np.minimum(exits_at(extremum, bound), steps)
        if _enough(calibration.outcome[rows, exits - 1], calibration, trained):
            tested = np.minimum(exits_at(running_extremum(scores[1], rule), bound), steps)
            return {"threshold": float(unsigned_threshold(np.array(bound), rule))} | _figures(test, tested, trained)
    return {"threshold": None} | _figures(test, np.full(len(test.latent), steps), trained)


def _uniform_row(calibration: Harvest, test: Harvest, trained: int) -> dict[str, Any]:
    enough = (k for k in range(1, trained + 1) if _enough(calibration.outcome[:, k - 1], calibration, trained))
    depth = next(enough)
    return {"rule": "fixed", "threshold": depth} | _figures(test, np.full(len(test.latent), depth), trained)


def _saturation_row(test: Harvest, trained: int) -> dict[str, Any]:
    return {"rule": "oracle-saturation", "threshold": None} | _figures(test, test.shard["saturation"].astype(int), trained)


def _figures(test: Harvest, exits: np.ndarray, trained: int) -> dict[str, Any]:
    _, document = np.unique(test.shard["document"], return_inverse=True)
    counts, outcome = np.bincount(document), test.outcome
    own = outcome[np.arange(len(exits)), exits - 1]
    depth, low, high = mean_interval(np.bincount(document, exits.astype(float))[None], counts, bounded=False)
    sign = _sign(test.metric)
    full = np.bincount(document, sign * outcome[:, trained - 1])
    delta, delta_low, delta_high = paired_difference(np.bincount(document, sign * own), full, counts)
    return {
        "mean_depth": float(depth[0]), "depth_lo": float(low[0]), "depth_hi": float(high[0]), "quality": float(own.mean()),
        "delta": float(delta), "delta_lo": float(delta_low), "delta_hi": float(delta_high),
    }  # fmt: skip
