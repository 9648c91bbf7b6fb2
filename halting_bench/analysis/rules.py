"""The rules of a gate: what must not get worse, by how much, and what an unclear answer means."""

import fnmatch
from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator


class Quantity(Enum):
    """What a rule watches."""

    QUALITY = "quality"
    MEAN_DEPTH = "mean_depth"
    DEPTH_AT_EQUAL_QUALITY = "depth_at_equal_quality"
    QUALITY_AT_EQUAL_DEPTH = "quality_at_equal_depth"
    FLOPS = "flops"
    LATENCY = "latency"
    HYPERVOLUME = "hypervolume"
    GAP_SHARE = "gap_share"

    def worse(self, higher_is_better: bool) -> Literal["up", "down", "both"]:
        """The direction in which it gets worse. A policy that fires early *lowers* depth, so depth may do neither."""
        if self is Quantity.MEAN_DEPTH:
            return "both"
        if self in (Quantity.QUALITY, Quantity.QUALITY_AT_EQUAL_DEPTH):
            return "down" if higher_is_better else "up"
        return "down" if self in (Quantity.HYPERVOLUME, Quantity.GAP_SHARE) else "up"

    @property
    def at_threshold(self) -> bool:
        """Whether both runs are read at one threshold."""
        return self in (Quantity.QUALITY, Quantity.MEAN_DEPTH, Quantity.FLOPS, Quantity.LATENCY)


def _margin(value: object) -> object:
    if isinstance(value, str) and value.endswith("%"):
        try:
            return {"value": float(value[:-1]) / 100, "relative": True}
        except ValueError:
            return value
    return {"value": value} if isinstance(value, (int, float)) and not isinstance(value, bool) else value


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Margin(Strict):
    """How much worse is still fine: in the quantity's own unit, or (written `2%`) a share of the baseline's value."""

    value: FiniteFloat = Field(ge=0)
    relative: bool = False

    def within(self, base: float) -> float:
        return self.value * abs(base) if self.relative else self.value

    def __str__(self) -> str:
        return f"{100 * self.value:g}%" if self.relative else f"{self.value:g}"


Leniency = Literal["fail", "warn"]


class GateRule(Strict):
    """One thing that must hold, for every model, benchmark and policy that its patterns match.

    `threshold` is where both runs are read; without one it is the baseline's point of equal quality.
    """

    quantity: Quantity
    margin: Annotated[Margin, BeforeValidator(_margin)]
    model: str = "*"
    benchmark: str = "*"
    policy: str
    threshold: FiniteFloat | None = None
    depth: Annotated[float, Field(ge=1)] | None = None  # only for quality_at_equal_depth
    evidence: Literal["replayed", "executed"] = "replayed"
    other_model: bool = False  # True: comparing another checkpoint is the purpose
    incomparable: Leniency = "fail"
    inconclusive: Leniency = "fail"

    @model_validator(mode="after")
    def _fits(self) -> "GateRule":
        if self.depth is not None and self.quantity is not Quantity.QUALITY_AT_EQUAL_DEPTH:
            raise ValueError(f"depth is for quality_at_equal_depth, not for {self.quantity.value}")
        if self.threshold is not None and not self.quantity.at_threshold:
            raise ValueError(f"{self.quantity.value} is not read at one threshold: leave threshold out")
        if self.quantity is Quantity.LATENCY and not self.margin.relative:
            raise ValueError("a latency margin is a share: write 5%, since bare seconds mean nothing on another machine")
        return self

    @property
    def name(self) -> str:
        at = "" if self.threshold is None else f" at {self.threshold:g}"
        at += "" if self.depth is None else f" at depth {self.depth:g}"
        return f"{self.quantity.value}{at}, {self.evidence}, within {self.margin}"

    def matches(self, model: str, benchmark: str) -> bool:
        return fnmatch.fnmatchcase(model, self.model) and fnmatch.fnmatchcase(benchmark, self.benchmark)

    def policies(self, known: list[str]) -> list[str]:
        return [name for name in known if fnmatch.fnmatchcase(name, self.policy)]


class GateRules(Strict):
    """A rules file."""

    rules: tuple[GateRule, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _each_once(self) -> "GateRules":
        for index, rule in enumerate(self.rules):
            if rule in self.rules[:index]:
                raise ValueError(f"the rule '{rule.name}' for {rule.policy} stands there twice: remove one")
        return self
