"""Which points of a finished run are timed, at which shapes, and what the timed work is."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from halting_bench.architectures.base import ModelSpec, RecurrentModel
from halting_bench.benchmarks.base import Sequence
from halting_bench.catalog import parse
from halting_bench.errors import UserError, unknown_name
from halting_bench.execution import ChosenPoint
from halting_bench.halting.policies import FixedDepth
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.jobs import Job, Plan, plan_sweep
from halting_bench.store import Run
from halting_bench.sweep_config import SweepConfig
from halting_bench.timing.points import Shape
from halting_bench.timing.protocol import Protocol
from halting_bench.timing.workloads import Build, decoding, fixed_length, prefill
from halting_bench.unit import Unit

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class UniformPoint:
    """A uniform depth. Its key is that of a bracket's own uniform depths."""

    threshold: float
    name: str = "fixed"

    @property
    def key(self) -> str:
        return f"fixed@{int(self.threshold)}"

    def policy(self) -> HaltingPolicy:
        return FixedDepth(int(self.threshold))


Point = ChosenPoint | UniformPoint


@dataclass(frozen=True)
class LatencyRequest:
    """What to time and how."""

    points: tuple[str, ...] = ()  # POLICY@THRESHOLD, beside those on the fronts
    batch_rows: tuple[int, ...] = (1, 8, 32, 64)
    device: str | None = None  # none: the run's
    length: int | None = None  # positions of a text, or prompt; none: the run's latency.length. At most what there is
    new_tokens: int = 32  # a decoded sequence, its first included. At most what the model has positions for
    time_budget_s: float = 600.0
    protocol: Protocol = field(default_factory=Protocol)

    def __post_init__(self) -> None:
        if not self.batch_rows or min(self.batch_rows) < 1:
            raise UserError(f"batch rows {list(self.batch_rows)} must be 1 or more: type --batch-rows 8")
        if self.length is not None and self.length < 1:
            raise UserError(f"length {self.length} leaves no text: type --length 1 or more")
        if self.new_tokens < 2:
            raise UserError(f"new tokens {self.new_tokens}: a prompt makes the first one, type --new-tokens 2 or more")


@dataclass(frozen=True)
class Target:
    """One (model, benchmark) of a run and its points to time, the most important first."""

    job: Job
    unit: Unit
    points: tuple[Point, ...]

    def texts(self) -> list[Sequence]:
        """The sequences of the test documents."""
        unit = self.unit
        return [s for d in unit.documents[unit.calibration() :] for s in unit.draw(self.job.benchmark.sequences(d))]

    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(len(text.tokens) for text in self.texts())


def plan_again(run: Run, device: str | None = None) -> Plan:
    """The plan that a run was made from.

    Args:
        device: where to run now; None: as the run was asked to.

    Raises:
        UserError: a model or benchmark is not what it was, so that seconds would be of something else.
    """
    config = parse(SweepConfig, run.manifest["config"], str(run.path / "manifest.json"))
    plan = plan_sweep(config.model_copy(update={"device": device} if device else {}))
    known = {entry["model"]: entry["model_hash"] for entry in run.manifest["models"]}
    known |= {entry["benchmark"]: entry["benchmark_hash"] for entry in run.manifest["benchmarks"]}
    for job in plan.jobs:
        for name, now in ((job.model_name, job.model_hash), (job.benchmark.name, job.benchmark_hash)):
            if known.get(name) != now:
                raise UserError(
                    f"{name} is not what {run.path} was swept with (then {known.get(name)}, now {now}): sweep again"
                )
    return plan


def targets(run: Run, plan: Plan, named: tuple[str, ...]) -> list[Target]:
    """Every (model, benchmark) with the points to time: named ones, those of equal quality, the rest of the front.

    Raises:
        UserError: a named point has no such policy, or none anywhere.
    """
    wanted = [parse_point(text) for text in named]
    known = {policy.recipe.name for policy in plan.jobs[0].units[0].plans} | {"fixed"}
    for name, _ in wanted:
        if name not in known:
            raise unknown_name("policy", name, known)
    found = []
    for job in plan.jobs:
        unit = job.units[0]
        rows = unit_points(run, unit)
        points = [point for name, threshold in wanted if (point := _point(unit, rows, name, threshold))]
        front = rows[(rows["split"] == "calibration") & rows["on_front"] & rows["distinct"]]
        front = front.assign(other=front["role"] != "iso").sort_values(["other", "mean_depth", "policy"], kind="stable")
        points += [p for row in front.itertuples() if (p := _point(unit, rows, str(row.policy), float(row.threshold)))]
        unique = {point.key: point for point in points}
        found.append(Target(job, unit, tuple(unique.values())))
    for name, threshold in wanted:
        if not any(point.name == name for target in found for point in target.points):
            raise UserError(f"{name}@{threshold:g} applies to no model of {run.path}: the run's report says why")
    if not any(target.points for target in found):
        raise UserError(f"{run.path} has no front points that one threshold names: name some with --point POLICY@THRESHOLD")
    return found


def unit_points(run: Run, unit: Unit) -> "pd.DataFrame":
    """The points of one unit that ran, both splits: replayed ones, or where nothing was replayed, those that executed.

    Of executed points those with one threshold for all loops: the threshold names them.
    """
    points = run.points
    own = (points["model"] == unit.model_name) & (points["benchmark"] == unit.benchmark_name) & (points["seed"] == unit.seed)
    ran = points[own & (points["subset"] == "all") & (points["status"] == "ok")]
    replayed = ran[ran["evidence"] == "replayed"]
    return replayed if len(replayed) else ran[~ran["params"].str.contains('"thresholds"', regex=False)]


def parse_point(text: str) -> tuple[str, float]:
    """POLICY@THRESHOLD. Raises UserError for anything else."""
    name, at, threshold = text.rpartition("@")
    try:
        value = float(threshold)
    except ValueError:
        value = float("nan")
    if not at or value != value:
        raise UserError(f"point '{text}' is not POLICY@THRESHOLD: type for example --point kl@0.001 or --point fixed@4")
    return name, value


def _point(unit: Unit, rows: "pd.DataFrame", name: str, threshold: float) -> Point | None:
    """A point of a unit; None where its policy does not apply. A threshold as tables print it means the one that they print."""
    thresholds = rows.loc[rows["policy"] == name, "threshold"].to_numpy()
    printed = [float(known) for known in thresholds if f"{known:.3g}" == f"{threshold:.3g}"]
    threshold = min(printed, key=lambda known: abs(known - threshold), default=threshold)
    if name == "fixed":
        if threshold not in range(1, unit.max_steps + 1):
            raise UserError(f"fixed@{threshold:g}: a uniform depth is a whole number in 1..{unit.max_steps}")
        return UniformPoint(threshold)
    plan = next((plan for plan in unit.plans if plan.recipe.name == name and not plan.not_applicable), None)
    return ChosenPoint(plan, threshold) if plan else None


def shapes(spec: ModelSpec, plan: Plan, request: LatencyRequest, longest: int) -> list[Shape]:
    """The shapes at which a target is timed. longest: of its texts."""
    length = min(request.length or plan.config.latency.length, longest)
    new_tokens = min(request.new_tokens, spec.max_length - length)
    modes = ("eager", "graph") if plan.device.startswith("cuda") else ("eager",)
    found = []
    for rows in request.batch_rows:
        found.append(Shape(plan.device, rows, "eager", "prefill", length))
        if spec.causal and new_tokens >= 2:
            found += [Shape(plan.device, rows, mode, "decode", length, new_tokens) for mode in modes]
    return found


def build_work(model: RecurrentModel, target: Target, shape: Shape, kv_mode: str) -> Build:
    """The work of a policy at a shape."""
    unit = target.unit
    rows = fixed_length(target.texts(), shape.batch_rows, shape.length)
    if shape.phase == "prefill":
        return prefill(model, rows, max_steps=unit.max_steps, kv_mode=kv_mode, seed=unit.seed)
    return decoding(
        model, [row.tokens.tolist() for row in rows], max_new_tokens=shape.new_tokens,
        max_steps=unit.max_steps, kv_mode=kv_mode, seed=unit.seed, mode=shape.mode,
    )  # fmt: skip


class Loaded:
    """The model in memory: one at a time."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._held: tuple[Job, RecurrentModel] | None = None

    def model(self, target: Target) -> RecurrentModel:
        import torch

        if self._held is None or self._held[0].source != target.job.source:
            self._held = None  # the old one goes before the new one comes
            dtype = getattr(torch, self.plan.config.dtype)
            self._held = target.job, target.job.source.load(dtype=dtype, device=self.plan.device)
        return self._held[1]
