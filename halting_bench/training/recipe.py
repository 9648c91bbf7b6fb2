"""What a training run is: one YAML file, validated before anything is downloaded or computed."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from halting_bench.benchmarks.masked import SURELY_HIDING
from halting_bench.benchmarks.tasks import TASKS
from halting_bench.errors import UserError, unknown_name
from halting_bench.training.corpus import CorpusSpec

CORPUS_TASKS = ("text", "masked")
"""Sources of batches that read the corpus: its next byte, or its hidden bytes."""

FAMILIES = ("huginn_raven", "self_transformer", "two_scale")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Depth(_Strict):
    """Loops per step: Poisson(LogNormal(mean, sigma)) + 1 (Geiping et al., section 3.3), the last `backprop` differentiated.

    A share `long` of the steps draws uniformly between the mean and `cap` instead, so that deep runs stay trained.
    """

    mean: float = 8.0
    sigma: float = 0.5
    cap: int = 32
    backprop: int = 4
    long: float = Field(0.05, ge=0, le=1)


class Optimizer(_Strict):
    """Muon on matrices inside blocks, AdamW on the rest; warm-up, a plateau, then a linear fall to `final` of the rate."""

    muon_lr: float = 0.01
    muon_decay: float = 0.1
    adam_lr: float = 2e-3
    warmup_steps: int = 100
    cooldown: float = Field(0.3, ge=0, le=1)
    final: float = 0.02
    clip: float = 1.0


class Curriculum(_Strict):
    """A task starts at its first level; it rises when the running accuracy on that level's own positions passes `raise_at`.

    `current` of the batches are at the current level, the rest uniform below. Only batches of at least `min_loops` count.
    """

    raise_at: float = 0.8
    current: float = 0.5
    min_loops: int = 8
    memory: float = 0.8


class Part(_Strict):
    """One source of batches: a procedural task, or the corpus (`text`: its next byte; `masked`: its hidden bytes)."""

    task: str
    weight: float = Field(1.0, gt=0)


class Ponder(_Strict):
    """PonderNet (arXiv 2107.05407): `beta` weighs the divergence from a geometric prior of chance `prior` a step."""

    kind: Literal["ponder"]
    beta: float = Field(0.01, ge=0)
    prior: float = Field(0.2, gt=0, lt=1)


class Act(_Strict):
    """ACT (arXiv 1603.08983): `tau` is the price of a step, `epsilon` what may be missing of a halting sum of 1."""

    kind: Literal["act"]
    tau: float = Field(0.01, ge=0)
    epsilon: float = Field(0.01, gt=0, lt=1)


class Recipe(_Strict):
    """A training run. Batches hold about `batch_tokens` tokens whatever their source."""

    name: str
    summary: str
    family: str = "huginn_raven"
    config: dict[str, Any]
    seed: int = 0
    threads: int = 1
    steps: int = Field(gt=0)
    batch_tokens: int = Field(2048, gt=0)
    window: int = Field(256, gt=0)
    document_start: float = Field(0.15, ge=0, le=1)  # share of the corpus's windows that begin at a document's first byte
    precision: Literal["float32", "bfloat16"] = "float32"
    export: Literal["float32", "bfloat16"] = "float32"
    depth: Depth = Depth()
    optimizer: Optimizer = Optimizer()
    curriculum: Curriculum = Curriculum()
    halting: Annotated[Ponder | Act, Field(discriminator="kind")] | None = None
    mixture: tuple[Part, ...] = Field(min_length=1)
    corpus: CorpusSpec | None = None
    checkpoint_every: int = Field(250, gt=0)
    log_every: int = Field(250, gt=0)
    benchmarks: tuple[str, ...] = ()
    cannot: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        for part in self.mixture:
            if part.task in CORPUS_TASKS and self.corpus is None:
                raise ValueError(f"the mixture has '{part.task}' but there is no corpus: add 'corpus: {{sources: [...]}}'")
            if part.task == "masked" and self.window < SURELY_HIDING:
                raise ValueError(f"in a window of {self.window} bytes 'masked' may hide none: give at least {SURELY_HIDING}")
        if (self.halting is None) == bool(self.config.get("halting_head")):
            raise ValueError("'halting' trains the head that 'config: {halting_head: true}' builds: give both or neither")
        return self


def load_recipe(path: Path) -> Recipe:
    """Reads and validates a recipe; every mistake is a UserError of one line."""
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read recipe '{path}': {error.strerror}; give the path of a YAML recipe") from error
    except yaml.YAMLError as error:
        raise UserError(f"recipe '{path}' is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise UserError(f"recipe '{path}' holds {type(raw).__name__}, not a mapping: start with 'name: ...'")
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "recipe"
        value = "" if first["type"] == "missing" or isinstance(first["input"], dict) else f" (got {first['input']!r})"
        raise UserError(f"recipe '{path}': {where}: {first['msg']}{value}") from error
    if recipe.family not in FAMILIES:
        raise unknown_name("model family", recipe.family, FAMILIES)
    for part in recipe.mixture:
        if part.task not in CORPUS_TASKS and part.task not in TASKS:
            raise unknown_name("task", part.task, [*TASKS, *CORPUS_TASKS])
    return recipe
