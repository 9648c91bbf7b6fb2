"""Resolves what a sweep was asked into what it will do: which policies apply to which model, with which rules."""

from dataclasses import dataclass
from pathlib import Path

from halting_bench.architectures.base import ModelSpec
from halting_bench.catalog import PolicyRecipe, RuleSpec, load_policy_class
from halting_bench.engine.replay import Rule
from halting_bench.errors import UserError, unknown_name
from halting_bench.halting.policies import AllOf, AnyOf, ThresholdPolicy
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.halting.signals import SIGNALS


@dataclass(frozen=True)
class PolicyPlan:
    """One recipe, resolved. Exactly one of `rule` and `opaque` is set."""

    recipe: PolicyRecipe
    rule: Rule | None
    opaque: tuple[tuple[float, HaltingPolicy], ...]
    needs_logits: bool
    signal_flops: float
    not_applicable: str  # why not, or ""

    def key(self, threshold: float) -> str:
        """Names an opaque instance in a trace."""
        return f"{self.recipe.name}@{threshold!r}"


def plan_policy(recipe: PolicyRecipe, spec: ModelSpec, max_steps: int) -> PolicyPlan:
    """Resolves a recipe against a model. Raises UserError for an unknown signal or a threshold that cannot be."""
    specs = [RuleSpec(signal=recipe.signal, hits=recipe.hits)] if recipe.signal else [*recipe.any_of, *recipe.all_of]
    for rule in specs:
        if rule.signal not in SIGNALS:
            raise unknown_name(f"signal in policy '{recipe.name}'", rule.signal, SIGNALS)
    signals = [SIGNALS[rule.signal] for rule in specs]
    if signals:
        for value in (*recipe.grid.absolute, *(rule.threshold for rule in specs if rule.threshold is not None)):
            if value < 0:
                raise UserError(f"policy '{recipe.name}': threshold {value} is negative, but its scores never are: give one above 0")
    first = max((signal.first + rule.hits - 1 for signal, rule in zip(signals, specs, strict=True)), default=1)
    reason = ""
    if any(signal.needs_gate for signal in signals) and not spec.has_gate:
        reason = "the model has no halting gate"
    elif first >= max_steps:
        reason = f"it can fire at step {first} at the earliest, and the model runs {max_steps}"
    opaque = () if recipe.signal else tuple((t, build_policy(recipe, t)) for t in recipe.grid.absolute)
    return PolicyPlan(
        recipe=recipe,
        rule=_rule(recipe) if recipe.signal else None,
        opaque=opaque,
        needs_logits=any(signal.needs_logits for signal in signals) if signals else True,
        signal_flops=float(sum(signal.flops(spec.width, spec.vocab_size) for signal in signals)),
        not_applicable=reason,
    )


def _rule(recipe: PolicyRecipe) -> Rule:
    signal = SIGNALS[str(recipe.signal)]
    return Rule(str(recipe.signal), signal.fires, signal.closed, recipe.hits, recipe.min_steps, recipe.every)


def build_policy(recipe: PolicyRecipe, threshold: float) -> HaltingPolicy:
    """The live policy at one threshold."""
    if recipe.signal:
        return ThresholdPolicy(recipe.signal, threshold, recipe.hits, recipe.min_steps, recipe.every)
    if recipe.python:
        return _user_policy(recipe, threshold)
    rules = tuple(
        ThresholdPolicy(
            rule.signal, threshold if rule.threshold is None else rule.threshold, rule.hits, max(rule.min_steps, recipe.min_steps), rule.every
        )
        for rule in recipe.any_of or recipe.all_of
    )
    return AnyOf(rules) if recipe.any_of else AllOf(rules)


def _user_policy(recipe: PolicyRecipe, threshold: float) -> HaltingPolicy:
    cls = load_policy_class(str(recipe.python))
    try:
        policy = cls(threshold=threshold, **recipe.params)
    except TypeError as error:
        raise UserError(f"policy '{recipe.name}': cannot build {recipe.python}(threshold={threshold}): {error}") from None
    if not isinstance(policy, HaltingPolicy):
        raise UserError(f"policy '{recipe.name}': {recipe.python} is no HaltingPolicy: derive it from halting_bench.HaltingPolicy")
    return policy


def trace_signals(plans: list[PolicyPlan]) -> tuple[str, ...]:
    """The signals that a trace must record for these policies."""
    return tuple(sorted({plan.rule.signal for plan in plans if plan.rule and not plan.not_applicable}))


def split_size(documents: int, fraction: float) -> int:
    """How many of a sample's documents calibrate: at least one on each side."""
    return min(max(round(documents * fraction), 1), documents - 1)


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.safetensors"
