"""Self-checks of a model: whether numbers measured on it may be believed. Each check says what it found as a figure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn

from halting_bench import catalog
from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.config import read_config
from halting_bench.architectures.flops import count_stages
from halting_bench.architectures.noise import initial_noise
from halting_bench.errors import UserError, unknown_name
from halting_bench.plan import plan_policy
from halting_bench.probe import Probe, relative_gap
from halting_bench.sources import ModelSource

LIMITS = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Largest allowed difference between two ways to the same logits, relative to the largest logit. Layers that compute
in float32 whatever the model's dtype, and loops that amplify, need the room; a wrong position or mask exceeds it by far."""

FLOPS_LIMIT = 0.02
NOISE_BYTES = 2 * 2**30
"""The noise floor needs the model in float64; a larger one than this would not fit beside the model."""

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
DEVICES = ("cpu", "cuda")
Reload = Callable[[torch.dtype], RecurrentModel]


@dataclass(frozen=True)
class Check:
    """One finding. verdict: pass, fail, info (a fact, which cannot fail) or skip. NaN: no such figure, or no limit."""

    name: str
    verdict: str
    figure: float
    unit: str
    limit: float = math.nan
    note: str = ""

    def as_dict(self) -> dict:
        """JSON-able: NaN becomes null."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


def at_most(name: str, figure: float, limit: float, unit: str, note: str = "") -> Check:
    """Passes while the figure is no larger than the limit; NaN fails."""
    return Check(name, "pass" if figure <= limit else "fail", figure, unit, limit, note)


def fact(name: str, figure: float, unit: str, note: str = "") -> Check:
    """Something to know, with nothing to fail."""
    return Check(name, "info", figure, unit, note=note)


def believable(checks: list[Check]) -> bool:
    """Whether nothing failed."""
    return all(check.verdict != "fail" for check in checks)


@torch.no_grad()
def examine(
    model: RecurrentModel,
    config: Mapping[str, object] | None = None,
    *,
    quick: bool = False,
    seed: int = 0,
    reload: Reload | None = None,
) -> list[Check]:
    """Runs the self-checks.

    Args:
        model: as loaded.
        config: its parsed config.json; None: a class of the user's.
        quick: the part that a sweep runs first: fewer tokens, three depths, no reloading.
        seed: of the random tokens and initial states.
        reload: gives the same model in another dtype, for the noise floor of the signals; None: it is not measured.
    """
    probe = Probe(model, tokens=5, depths=3, seed=seed) if quick else Probe(model, tokens=12, seed=seed)
    checks = [
        _guarded("finite at every depth", lambda: finite(probe)),
        _guarded("same input, same bits", lambda: repeatable(probe)),
        _guarded("batch = single", lambda: batch_against_single(probe)),
        _guarded("padding is invisible", lambda: padding(probe)),
        _guarded("cached = uncached", lambda: cached_against_uncached(probe)),
        _guarded("steps share weights", lambda: shared_weights(probe)),
        _guarded("tied embeddings", lambda: tied_embeddings(model, config or {})),
        _guarded("s_0 is seeded", lambda: initial_state(probe, seed)),
        _guarded("halting gate", lambda: gate(probe)),
        _guarded("FLOPs = counter", lambda: flops_against_counter(model)),
        _guarded("cost grows with depth", lambda: monotone_cost(model)),
    ]
    if quick:
        return checks
    checks += [*loops_available(model), *memory(model)]
    if reload is not None and believable(checks):
        checks += noise_floor(model, reload, seed)
    return checks


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """A check that could not be made has failed: a class of the user's may raise anything."""
    try:
        return check()
    except Exception as error:
        return Check(name, "fail", math.nan, "", note=f"raised {type(error).__name__}: {error}"[:200])


def examine_source(source: ModelSource, *, dtype: str, device: str, quick: bool = False) -> list[Check]:
    """Loads a model and runs its self-checks. Raises UserError when it cannot be loaded at all."""
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if device not in DEVICES:
        raise unknown_name("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device '{device}': this machine has none that torch sees: use --device cpu")
    config = read_config(source.folder) if source.folder is not None else None

    def load(kind: torch.dtype) -> RecurrentModel:
        return source.load(dtype=kind, device=device)

    return examine(load(DTYPES[dtype]), config, quick=quick, reload=load)


def _limit(probe: Probe) -> float:
    return LIMITS.get(probe.dtype, LIMITS[torch.float32])


def _logits(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [logits for _, logits in pairs]


def finite(probe: Probe) -> Check:
    """No weight is NaN or infinite (fused attention may hide one), and no state and no logit, at any depth."""
    broken = [name for name, weight in probe.model.named_parameters() if not bool(weight.isfinite().all())]
    if broken:
        return at_most("finite at every depth", len(broken), 0, "tensors", f"of weights that are not, such as {broken[0]}")
    bad = sum(not bool(state.isfinite().all() and logits.isfinite().all()) for state, logits in probe.dense())
    return at_most("finite at every depth", bad, 0, "depths", f"that are not, of {probe.depths}")


def repeatable(probe: Probe) -> Check:
    """The same input gives the same bits twice: no dropout, no draw without a seed."""
    figure, _ = relative_gap(_logits(probe.dense()), _logits(probe.dense()))
    return at_most("same input, same bits", figure, 0.0, "relative")


def batch_against_single(probe: Probe) -> Check:
    """A sequence's logits do not depend on its batch."""
    figure, depth = relative_gap(_logits(probe.dense(rows=1)), [logits[:1] for logits in _logits(probe.dense())])
    return at_most("batch = single", figure, _limit(probe), "relative", f"worst at depth {depth}")


def padding(probe: Probe) -> Check:
    """Right padding changes no real position."""
    short = max(1, probe.tokens.shape[1] - 2)
    padded = [logits[:, :short] for logits in _logits(probe.dense(real=short))]
    figure, depth = relative_gap(padded, _logits(probe.dense(length=short)))
    return at_most("padding is invisible", figure, _limit(probe), "relative", f"worst at depth {depth}")


def cached_against_uncached(probe: Probe) -> Check:
    """One position at a time over a cache equals the whole sequence at once, at every depth."""
    name = "cached = uncached"
    if not probe.spec.causal:
        return Check(name, "skip", math.nan, "", note="an encoder has no cache")
    if probe.spec.dense_only:
        return Check(name, "skip", math.nan, "", note="positions mix outside attention: replayed evidence only")
    figure, depth = relative_gap(probe.cached(), _logits(probe.dense()))
    return at_most(name, figure, _limit(probe), "relative", f"depths 1..{probe.depths}, worst at {depth}")


def shared_weights(probe: Probe) -> Check:
    """Every step runs on the same weights."""
    first, second = probe.weights_by_step()
    different = len(first - second) if probe.spec.dense_only else len(first ^ second)  # a first pass may get no messages
    if not first:
        return Check("steps share weights", "fail", math.nan, "", note="a step touches no weights")
    return at_most("steps share weights", different, 0, "tensors", f"that differ between steps, of {len(first)}")


def tied_embeddings(model: RecurrentModel, config: Mapping[str, object]) -> Check:
    """The head is the embedding exactly when the config says so."""
    tables = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    tied = any(m.weight.data_ptr() in tables for m in model.modules() if isinstance(m, nn.Linear))
    asked = config.get("tie_embeddings", config.get("tie_word_embeddings"))
    if asked is None:
        return fact("tied embeddings", float(tied), "", f"{'tied' if tied else 'not tied'}; the config does not say")
    note = f"{'tied' if tied else 'not tied'}, and the config says {'tied' if asked else 'not tied'}"
    return Check("tied embeddings", "pass" if tied == bool(asked) else "fail", float(tied), "", note=note)


def initial_state(probe: Probe, seed: int) -> Check:
    """A drawn s_0 is a function of seed, sequence and position alone; another seed draws another."""
    if not any(loop.random_start for loop in probe.spec.loops):
        return fact("s_0", math.nan, "", "not drawn: a function of the input")
    width = probe.spec.width
    batch = initial_noise(seed, np.arange(2)[:, None], np.arange(4)[None], width)
    alone = initial_noise(seed, np.array([[1]]), np.array([[3]]), width)
    other = initial_noise(seed + 1, np.arange(2)[:, None], np.arange(4)[None], width)
    seeded = bool((batch[1, 3] == alone[0, 0]).all()) and not bool((batch == other).any())
    x = torch.zeros(1, 1, width, device=probe.device, dtype=probe.dtype)
    states = [probe.model.begin(0, x, noise[:1, :1].to(probe.device)) for noise in (batch, other)]
    used = not torch.equal(*states)
    note = "same for any batch, other for another seed" if seeded and used else "the noise given is not used"
    return Check("s_0 is seeded", "pass" if seeded and used else "fail", float(states[0].double().std()), "std", note=note)


def gate(probe: Probe) -> Check:
    """The model's own gate is there, inside (0, 1), and moves with the state."""
    if not probe.spec.has_gate:
        return fact("halting gate", math.nan, "", "none: gate-cdf and act do not apply")
    values = torch.stack([probe.model.gate(state).double() for state, _ in probe.dense()])
    inside, spread = bool(((values > 0) & (values < 1)).all()), float(values.max() - values.min())
    note = f"spread {spread:.2g} over rows and loops" if inside else "outside (0, 1)"
    return Check("halting gate", "pass" if inside and spread > 0 else "fail", float(values.mean()), "mean", note=note)


def flops_against_counter(model: RecurrentModel) -> Check:
    """FLOPs that the model states equal those that a counter sees."""
    length = min(24, model.spec.max_length)
    stated, counted = model.costs(), count_stages(model, length)
    gaps = {stage: abs(stated[stage].at(length) - n) / max(n, 1.0) for stage, n in counted.items()}
    worst = max(gaps, key=gaps.__getitem__)
    return at_most("FLOPs = counter", gaps[worst], FLOPS_LIMIT, "relative", f"worst in {worst}")


def monotone_cost(model: RecurrentModel) -> Check:
    """Another step always costs something."""
    least = min(flops.at(1) for stage, flops in model.costs().items() if stage.startswith("step/"))
    verdict = "pass" if least > 0 else "fail"
    return Check("cost grows with depth", verdict, least / 1e6, "MFLOP", note="a step of the cheapest loop, a token")


def loops_available(model: RecurrentModel) -> list[Check]:
    """How deep it may go, and which policies that leaves."""
    spec = model.spec
    most = spec.mean_recurrence * (1 if spec.fixed_recurrence else 4)
    plans = [plan_policy(catalog.find_policy(name), spec, most) for name in catalog.policy_names()]
    unfit = [plan.recipe.name for plan in plans if plan.not_applicable]
    per = f" in each of {len(spec.loops)}" if len(spec.loops) > 1 else ""
    more = "no more are defined" if spec.fixed_recurrence else "more may be run"
    return [
        fact("trained loops", spec.mean_recurrence, "steps", f"{more}{per}"),
        fact("policies that do not apply", len(unfit), f"of {len(plans)}", ", ".join(unfit)),
    ]


def memory(model: RecurrentModel) -> list[Check]:
    """Bytes of the weights, and of the K/V of a token that runs the trained number of loops."""
    spec = model.spec
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    element = next(model.parameters()).element_size()
    looped = sum(loop.layers for loop in spec.loops)
    slots = spec.layers - looped + looped * spec.mean_recurrence
    kv = 2 * spec.kv_heads * spec.head_width * element * slots
    return [
        fact("weights", sum(weights.values()) / 1e6, "MB"),
        fact("K/V of a token", kv / 1e3, "kB", f"{slots} slots (loop, layer)"),
    ]


def noise_floor(model: RecurrentModel, reload: Reload, seed: int) -> list[Check]:
    """What rounding alone makes of a signal: one step from the same state in this dtype and in float64.

    A threshold below the floor tests the arithmetic, not the model.
    """
    size = 8 * sum(p.numel() for p in model.parameters())
    if size > NOISE_BYTES:
        return [Check("noise floor", "skip", math.nan, "", note=f"needs {size / 1e9:.1f} GB more for float64")]
    exact = Probe(reload(torch.float64), tokens=12, seed=seed)
    checks = []
    for dtype in (torch.float32, torch.bfloat16):
        rough = Probe(reload(dtype), tokens=12, seed=seed)
        step, kl = _rounding(exact, rough)
        name = str(dtype).removeprefix("torch.")
        checks += [fact(f"noise of latent-diff, {name}", step, "median"), fact(f"noise of kl, {name}", kl, "nats")]
    return checks


def _rounding(exact: Probe, rough: Probe) -> tuple[float, float]:
    loop, last = 0, exact.depths - 1
    state = exact.dense()[max(0, last - 1)][0]
    after, log_p = [], []
    for probe in (exact, rough):
        context = DenseContext(probe.tokens.shape[1], causal=probe.spec.causal, device=probe.device)
        x = probe.model.embed(probe.tokens, context)
        stepped = probe.model.step(loop, state.to(probe.dtype), x, context)
        logits = probe.model.readout(probe.model.end(loop, state.to(probe.dtype), context), context)
        after.append(stepped.double())
        log_p.append(logits.double().log_softmax(-1))
    step = (after[0] - after[1]).norm(dim=-1) / after[0].norm(dim=-1)
    kl = (log_p[0].exp() * (log_p[0] - log_p[1])).sum(-1)
    return float(step.median()), float(kl.median())
