"""A deployment file: the policy and threshold to run a model with, and what was promised of them.

The file is YAML. Our decoder takes its `policy()`; where the same choice can be expressed, it also states the arguments of
Huginn's `generate_with_adaptive_compute` (seal-rg/recurrent-pretraining) and Ouro's `exit_threshold`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from halting_bench.catalog import PolicyRecipe, Strict, load_yaml, parse, show
from halting_bench.errors import UserError
from halting_bench.store import write_bytes

if TYPE_CHECKING:
    from halting_bench.halting.policy import HaltingPolicy

HUGINN_CRITERIA = {
    "latent-diff": "latent-diff",
    "cosine": "cosine",
    "kl": "kl",
    "min-p-kl": "minp-kl",
    "entropy-diff": "entropy-diff",
    "argmax-stable": "argmax-stability",
}
"""Our signals -> Huginn's criteria that compute the same."""


class Certificate(Strict):
    """What was promised, on which documents, and what the test documents then showed."""

    run_id: str
    benchmark: str
    metric: str
    evidence: str
    max_loss: float
    confidence: float
    bound: float
    policies_compared: int
    n_documents: int
    mean_depth: float
    loss: float


class Deployment(Strict):
    """One choice, complete: a `recipe` with its threshold, or (without one) a uniform depth."""

    schema_version: Literal[1] = 1
    model: str
    model_hash: str
    recipe: PolicyRecipe | None
    threshold: float
    max_steps: int
    certificate: Certificate
    huginn: dict[str, Any] | None = None
    ouro: dict[str, Any] | None = None

    def policy(self) -> "HaltingPolicy":
        """The live policy."""
        from halting_bench.halting.policies import FixedDepth
        from halting_bench.plan import build_policy

        return FixedDepth(int(self.threshold)) if self.recipe is None else build_policy(self.recipe, self.threshold)

    def check_model(self, model_hash: str) -> None:
        """Raises UserError when this is not the model that the choice was made for."""
        if model_hash != self.model_hash:
            raise UserError(
                f"this deployment is of model {self.model_hash}, not {model_hash}: thresholds do not carry over, "
                "run `halting-bench recommend` on a sweep of this model"
            )


def write_deployment(path: Path, deployment: Deployment) -> None:
    import yaml

    write_bytes(path, yaml.safe_dump(show(deployment), sort_keys=False).encode())


def read_deployment(path: Path) -> Deployment:
    """Raises UserError when the file is missing, broken, or of another schema."""
    return parse(Deployment, load_yaml(path), str(path))


def huginn_arguments(recipe: PolicyRecipe | None, threshold: float, max_steps: int) -> dict[str, Any] | None:
    """Keyword arguments of `generate_with_adaptive_compute` that make the same choice, or None where there are none.

    Huginn checks after step min_steps + 1 at the earliest, ours forbids halting before step min_steps. Its check of every
    n-th step compares states n steps apart, ours neighbours, so that has no equivalent.
    """
    if recipe is None:
        return {"criterion": "none", "num_steps": int(threshold)}
    if recipe.signal not in HUGINN_CRITERIA or recipe.hits != 1 or recipe.every != 1:
        return None
    stable = recipe.signal == "argmax-stable"
    return {
        "criterion": HUGINN_CRITERIA[recipe.signal],
        "exit_threshold": int(threshold) if stable else threshold,
        "min_steps": recipe.min_steps - 1,
        "num_steps": max_steps,
    }


def ouro_arguments(recipe: PolicyRecipe | None, threshold: float) -> dict[str, Any] | None:
    """Ouro's `exit_threshold`, the quantile of its exit distribution, where the policy is that rule; else None."""
    if recipe is None or recipe.signal != "gate-cdf" or (recipe.hits, recipe.min_steps, recipe.every) != (1, 1, 1):
        return None
    return {"exit_threshold": threshold}
