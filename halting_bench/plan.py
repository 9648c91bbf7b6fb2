"""Resolves what a sweep was asked into what it will do: which policies apply to which model, with which rules."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from halting_bench.architectures.base import ModelSpec
from halting_bench.catalog import PolicyRecipe, RuleSpec, load_policy_class
from halting_bench.engine.controls import combined_exits, opaque_exits
from halting_bench.engine.points import ExitSource
from halting_bench.engine.replay import Combination, Rule
from halting_bench.errors import UserError, unknown_name
from halting_bench.halting.policies import AllOf, AnyOf, Jointly, ThresholdPolicy
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.halting.routers import RouterPolicy, load_router
from halting_bench.halting.signals import SIGNALS


@dataclass(frozen=True)
class PolicyPlan:
    """One recipe, resolved. Exactly one of `rule`, `combination` and `opaque` is set."""

    recipe: PolicyRecipe
    rule: Rule | None
    combination: Combination | None
    opaque: tuple[tuple[float, HaltingPolicy], ...]
    needs_logits: bool
    signal_flops: float
    not_applicable: str  # why not, or ""

    def rules(self) -> tuple[Rule, ...]:
        """The threshold rules whose scores its replay reads."""
        if self.combination:
            return self.combination.rules
        return (self.rule,) if self.rule else ()

    def exits(self, thresholds: list[float]) -> ExitSource:
        """Where the rows of each threshold stop, for a policy that is not one threshold rule."""
        if self.combination:
            return combined_exits(self.combination, thresholds)
        return opaque_exits([self.key(threshold) for threshold in thresholds])

    def key(self, threshold: float) -> str:
        """Names an opaque instance in a trace."""
        return f"{self.recipe.name}@{threshold!r}"


def plan_policy(recipe: PolicyRecipe, spec: ModelSpec, max_steps: int, model_hash: str = "") -> PolicyPlan:
    """Resolves a recipe against a model; its hash tells which routers are its own. Raises UserError as `check_signals` does."""
    check_signals(recipe)
    specs = (
        [RuleSpec(signal=recipe.signal, hits=recipe.hits, min_steps=recipe.min_steps, every=recipe.every)]
        if recipe.signal
        else [*recipe.any_of, *recipe.all_of]
    )
    signals = [SIGNALS[rule.signal] for rule in specs]
    each = [first_step(rule, recipe) for rule in specs] or [1]
    first = min(each) if recipe.any_of else max(each)
    reason = ""
    if any(signal.needs_gate for signal in signals) and not spec.has_gate:
        reason = "the model has no halting gate"
    elif any(signal.whole_sequence for signal in signals) and spec.causal:
        reason = "it stops a sequence as a whole, which is for encoders"
    elif recipe.jointly and len(spec.loops) == 1:
        reason = "one decision for all loops is for models of several loops"
    elif first >= max_steps:
        reason = f"it can fire at step {first} at the earliest, and the model runs {max_steps}"
    router = load_router(Path(recipe.router)) if recipe.router else None
    if router and router.model_hash != model_hash:
        reason = f"the router was trained on model {router.model_hash}: make one for this model with halting-bench train-router"
    build = partial(RouterPolicy, router) if router else partial(build_policy, recipe)
    opaque = tuple((t, build(t)) for t in recipe.grid.absolute) if recipe.python or router else ()
    return PolicyPlan(
        recipe=recipe,
        rule=replay_rule(specs[0], recipe) if recipe.signal else None,
        combination=replay_combination(recipe) if recipe.any_of or recipe.all_of else None,
        opaque=opaque,
        needs_logits=any(signal.needs_logits for signal in signals) or any(policy.needs_logits for _, policy in opaque),
        signal_flops=float(router.flops() if router else sum(s.flops(spec.width, spec.vocab_size) for s in signals)),
        not_applicable=reason,
    )


def check_signals(recipe: PolicyRecipe) -> None:
    """Raises UserError for an unknown signal, or a threshold that its scores can never reach."""
    combined = [*recipe.any_of, *recipe.all_of]
    for signal in [recipe.signal] if recipe.signal else [rule.signal for rule in combined]:
        if signal not in SIGNALS:
            raise unknown_name(f"signal in policy '{recipe.name}'", str(signal), SIGNALS)
    if recipe.python or recipe.router:
        return
    for value in (*recipe.grid.absolute, *(rule.threshold for rule in combined if rule.threshold is not None)):
        if value < 0:
            raise UserError(f"policy '{recipe.name}': threshold {value} is negative, but scores never are: give one above 0")


def first_step(rule: RuleSpec, recipe: PolicyRecipe) -> int:
    """The first step at which a rule of a recipe can fire: `hits` checks from its first defined score, after `min_steps`."""
    enough = -(-SIGNALS[rule.signal].first // rule.every) + rule.hits - 1
    allowed = -(-max(rule.min_steps, recipe.min_steps) // rule.every)
    return max(enough, allowed) * rule.every


def replay_rule(spec: RuleSpec, recipe: PolicyRecipe) -> Rule:
    """A threshold rule of a recipe as the replay needs it."""
    signal = SIGNALS[spec.signal]
    return Rule(spec.signal, signal.fires, signal.closed, spec.hits, max(spec.min_steps, recipe.min_steps), spec.every)


def replay_combination(recipe: PolicyRecipe) -> Combination:
    """The rules of a combined recipe as the replay needs them."""
    specs = recipe.any_of or recipe.all_of
    return Combination(tuple(replay_rule(s, recipe) for s in specs), tuple(s.threshold for s in specs), bool(recipe.all_of))


def build_policy(recipe: PolicyRecipe, threshold: float) -> HaltingPolicy:
    """The live policy at one threshold."""
    rule = _build_rule(recipe, threshold)
    return Jointly(rule) if recipe.jointly else rule


def _build_rule(recipe: PolicyRecipe, threshold: float) -> HaltingPolicy:
    if recipe.signal:
        return ThresholdPolicy(recipe.signal, threshold, recipe.hits, recipe.min_steps, recipe.every)
    if recipe.python:
        return _user_policy(recipe, threshold)
    if recipe.router:
        return RouterPolicy(load_router(Path(recipe.router)), threshold)
    rules = tuple(
        ThresholdPolicy(
            rule.signal,
            threshold if rule.threshold is None else rule.threshold,
            rule.hits,
            max(rule.min_steps, recipe.min_steps),
            rule.every,
        )
        for rule in recipe.any_of or recipe.all_of
    )
    return AnyOf(rules) if recipe.any_of else AllOf(rules)


def _user_policy(recipe: PolicyRecipe, threshold: float) -> HaltingPolicy:
    cls = load_policy_class(str(recipe.python))
    try:
        policy = cls(threshold=threshold, **recipe.params)
    except Exception as error:  # whatever the user's class raises is the user's to mend, in one line
        told = f"{type(error).__name__}: {error}"
        raise UserError(f"policy '{recipe.name}': cannot build {recipe.python}(threshold={threshold}): {told}") from error
    if not isinstance(policy, HaltingPolicy):
        raise UserError(
            f"policy '{recipe.name}': {recipe.python} is no HaltingPolicy: derive it from halting_bench.HaltingPolicy"
        )
    return policy


def trace_signals(plans: list[PolicyPlan]) -> tuple[str, ...]:
    """The signals that a trace must record for these policies."""
    rules = [rule for plan in plans if not plan.not_applicable for rule in plan.rules()]
    return tuple(sorted({rule.signal for rule in rules}))


def split_size(documents: int, fraction: float) -> int:
    """How many of a sample's documents calibrate: at least one on each side."""
    return min(max(round(documents * fraction), 1), documents - 1)


def folder_name(benchmark: str) -> str:
    """What a benchmark's folder under trace/ and cells/ is called."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in benchmark)


COMPLETE = "complete.json"
"""Names the file that says how many shards a trace has: without it, the pass did not end."""


def shard_path(folder: Path, index: int) -> Path:
    """Where the trace of a unit keeps its shard of this number."""
    return folder / f"{index:05d}.safetensors"


def trace_shards(folder: Path) -> list[Path]:
    """The shards of a complete trace, in order. Raises FileNotFoundError when it is not complete."""
    count = json.loads((folder / COMPLETE).read_text())["shards"]
    shards = [shard_path(folder, index) for index in range(count)]
    for path in shards:
        path.stat()
    return shards
