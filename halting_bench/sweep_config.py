"""What a sweep can be told: from a file, from flags, and from `--set`. Data only: nothing here imports torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field

from halting_bench.catalog import Strict, load_yaml, parse
from halting_bench.errors import UserError

if TYPE_CHECKING:
    from halting_bench.timing.protocol import Protocol


def _limit(value: str | int) -> str | int:
    if (
        isinstance(value, bool)
        or (isinstance(value, int) and value < 2)
        or (isinstance(value, str) and value not in ("default", "all"))
    ):
        raise ValueError("must be a number of documents (2 or more: some calibrate, some test), 'all' or 'default'")
    return value


class LatencyConfig(Strict):
    """How chosen points are timed (see timing.protocol.Protocol for the protocol's own settings)."""

    enabled: bool = True
    batch_rows: int = Field(default=8, ge=1)
    length: int = Field(default=48, ge=1)  # tokens of a timed sequence, at most
    min_runs: int = Field(default=6, ge=1)
    min_time_s: float = Field(default=0.1, ge=0)
    max_time_s: float = Field(default=2.0, gt=0)
    blocks: int = Field(default=3, ge=1)
    warm_ups: int = Field(default=1, ge=1)
    noise_target: float = Field(default=0.05, gt=0)
    time_budget_s: float = Field(default=40.0, ge=0)  # of the whole sweep, shared out evenly

    def protocol(self, jobs: int) -> "Protocol":
        """The timing protocol of one of `jobs` equal shares."""
        from halting_bench.timing.protocol import Protocol

        own = self.model_dump(exclude={"enabled", "batch_rows", "length", "time_budget_s"})
        return Protocol(**own, time_budget_s=self.time_budget_s / jobs)


class LmEvalConfig(Strict):
    """How `lm-eval:TASK` benchmarks are read."""

    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    include_path: str | None = None  # a folder with more task files
    offline: bool = False  # make no request to the hub


class SweepConfig(Strict):
    """Everything a sweep can be told. Every leaf can be set with `--set a.b=c`."""

    models: tuple[str, ...] = Field(default=("huginn-tiny", "huginn-tiny-text"), min_length=1)
    benchmarks: tuple[str, ...] | None = None  # none: those that each model's card names
    policies: tuple[str, ...] | None = None  # none: every recipe that is built in or plugged in
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1)
    limit: Annotated[str | int, AfterValidator(_limit)] = "default"  # documents; default: each benchmark's own sample
    max_steps: Annotated[int, Field(ge=2)] | None = None  # none: four times the trained mean (or the loops there are)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    calibration_fraction: float = Field(default=0.5, gt=0, lt=1)
    shard_tokens: int = Field(default=8192, ge=1)  # tokens traced between two writes: what an interruption costs, and memory
    batch_tokens: int = Field(default=2048, ge=1)
    trust_remote_code: bool = False
    keep_trace: bool = False
    execute: bool = True  # act out and time the iso-quality point of each benchmark, a faster and a slower one
    kv_mode: str = "latest"
    prefill: str = "adaptive"
    latency: LatencyConfig = LatencyConfig()
    lm_eval: LmEvalConfig = LmEvalConfig()
    plots: bool = True
    like: str | None = None  # a run whose points this one must have too, so that the two can be compared
    rules: str | None = None  # a gate's rules, whose thresholds this run must have


def read_config(
    file: Path | None, overrides: dict[str, Any], settings: list[str], *, like: dict[str, Any] | None = None
) -> SweepConfig:
    """Settings, the later over the earlier, validated once.

    Args:
        file: YAML, over the defaults.
        overrides: flags; None where one was not given.
        settings: `key=value` of `--set`; dots go inside.
        like: what another run was asked, in place of the defaults.
    """
    value: dict[str, Any] = {**(like or {}), **(load_yaml(file) if file else {})}
    value |= {key: given for key, given in overrides.items() if given is not None}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise UserError(f"--set {setting}: write key=value, for example --set limit=64")
        try:
            parsed = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"--set {setting}: '{text}' is not a YAML value") from None
        inner = value
        *parents, leaf = path.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise UserError(f"--set {setting}: '{parent}' holds a value, not a group of keys")
        inner[leaf] = parsed
    return parse(SweepConfig, value, str(file) if file else "sweep options")
