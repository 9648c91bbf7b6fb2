"""Points that a sweep must have because something else names them: a run to compare with, or the rules of a gate."""

from pathlib import Path

from halting_bench.analysis.pairing import Point
from halting_bench.analysis.rules import GateRules
from halting_bench.catalog import PolicyRecipe, load_yaml, parse
from halting_bench.store import load_run
from halting_bench.sweep_config import SweepConfig

Named = dict[str, tuple[float, ...]]
"""Policy -> thresholds."""


def named_points(config: SweepConfig, model: str, benchmark: str, policies: list[str]) -> Named:
    """The thresholds of each policy that `like` and `rules` ask for.

    Raises:
        UserError: `like` is no finished run, or `rules` no rules file.
    """
    found: dict[str, list[float]] = {}
    if config.like is not None:
        frame = load_run(config.like).per_document
        if frame.empty:  # only acted out: the recipes' own grids give the same points again
            frame = frame.reindex(columns=["model", "benchmark", "evidence", "policy", "threshold"])
        own = frame[(frame["benchmark"] == benchmark) & (frame["evidence"] == "replayed")]
        if own["model"].nunique() > 1:
            own = own[own["model"] == model]
        for policy, threshold in own[["policy", "threshold"]].drop_duplicates().itertuples(index=False, name=None):
            found.setdefault(policy, []).append(float(threshold))
    if config.rules is not None:
        for rule in parse(GateRules, load_yaml(Path(config.rules)), config.rules).rules:
            if rule.threshold is not None and rule.matches(model, benchmark):
                for policy in rule.policies(policies):
                    found.setdefault(policy, []).append(rule.threshold)
    return {policy: tuple(dict.fromkeys(found[policy])) for policy in policies if policy in found}


def is_named(named: Named, policy: str, threshold: float) -> bool:
    """Whether a point is among them, in whatever precision its threshold is written."""
    return any(Point(policy, threshold).same(Point(policy, other)) for other in named.get(policy, ()))


def with_points(recipe: PolicyRecipe, named: Named) -> PolicyRecipe:
    """The recipe with its named thresholds in the grid."""
    if recipe.name not in named:
        return recipe
    absolute = tuple(dict.fromkeys((*recipe.grid.absolute, *named[recipe.name])))
    return recipe.model_copy(update={"grid": recipe.grid.model_copy(update={"absolute": absolute})})
