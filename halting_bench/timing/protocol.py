"""How points are timed: warmed up, interleaved in balanced random order over blocks, until the median is known.

Fixed orders are not neutral: whoever runs second runs on a warmer machine, and the same code timed against itself then
differs by tens of percent. So every round is a row of a randomised Williams square.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from halting_bench.errors import UserError
from halting_bench.timing.clock import Clock, Sample
from halting_bench.timing.medians import Interval, median
from halting_bench.timing.telemetry import Telemetry


@dataclass(frozen=True)
class TimedPoint:
    """Something to time. run: does the work at its measured shape, returns the tokens processed (always as many)."""

    key: str
    run: Callable[[], int]


@dataclass(frozen=True)
class Protocol:
    """When a point is done: after `min_runs` and `min_time_s`, over `blocks` blocks, at the noise target or a cap."""

    min_runs: int = 12
    min_time_s: float = 0.5
    max_time_s: float = 10.0  # of timed runs, a point
    max_runs: int = 2000
    blocks: int = 3  # at least
    warm_ups: int = 2  # the first compiles and captures; the last one tells what a run costs
    noise_target: float = 0.03  # relative half-width of the median's interval
    confidence: float = 0.95
    time_budget_s: float | None = None  # for everything that one call of `measure` does

    def __post_init__(self) -> None:
        for name in ("min_runs", "max_runs", "max_time_s", "blocks", "warm_ups", "noise_target"):
            if not getattr(self, name) > 0:
                raise UserError(
                    f"{name} {getattr(self, name)} of the latency protocol must be above 0: type --set latency.{name}=N"
                )
        if self.time_budget_s is not None and not self.time_budget_s >= 0:
            raise UserError(f"time budget {self.time_budget_s} must be at least 0 seconds: type --time-budget SECONDS")

    @property
    def runs_per_block(self) -> int:
        return math.ceil(self.min_runs / self.blocks)


Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Timing:
    """What was measured of one point. Raw samples are kept in the order they were taken."""

    key: str
    status: Status
    error: str = ""  # why it failed or was skipped
    tokens: int = 0  # a run
    samples_s: tuple[float, ...] = ()  # wall seconds a run
    device_samples_s: tuple[float, ...] = ()  # by the device's own events; NaN on a CPU
    sample_blocks: tuple[int, ...] = ()
    noisy: bool = False
    prompt_s: float = 0.0  # of every sample, what is not the phase's own: the prompts of a decode run

    def seconds(self, confidence: float = 0.95) -> Interval:
        """The median run without its prompts; nothing unless the point is `ok`."""
        if self.status != "ok":
            return Interval()
        whole = median(self.samples_s, confidence)
        return Interval(whole.value - self.prompt_s, whole.lo - self.prompt_s, whole.hi - self.prompt_s)

    def columns(self) -> dict[str, object]:
        """Its part of a row of latency.parquet: milliseconds a token, NaN unless the point is `ok`."""
        seconds = self.seconds().value
        p10, p90 = np.quantile(self.samples_s, (0.1, 0.9)) - self.prompt_s if self.status == "ok" else (math.nan, math.nan)
        per_token = 1e3 / self.tokens if self.tokens else math.nan
        return {
            "samples_ms": [1e3 * sample for sample in self.samples_s],
            "device_samples_ms": [1e3 * sample for sample in self.device_samples_s],
            "sample_blocks": list(self.sample_blocks),
            "prompt_ms": 1e3 * self.prompt_s,
            "tokens_per_run": self.tokens,
            "latency_ms_per_token": seconds * per_token,
            "p10": float(p10) * per_token,
            "p90": float(p90) * per_token,
            "tokens_per_s": self.tokens / seconds if seconds > 0 else math.nan,  # a decode run may drown in its prompt's noise
            "noisy": self.noisy,
            "status": self.status,
            "error": self.error,
        }


@dataclass(eq=False)
class _Course:
    """A point on its way through `measure`."""

    point: TimedPoint
    samples: list[Sample] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    run_s: float = math.nan  # what the last warm-up took
    tokens: int | None = None
    status: Status = "ok"
    error: str = ""

    def run(self, clock: Clock) -> Sample | None:
        """One run; a failure is kept, and None returned."""
        try:
            sample = clock.time(self.point.run)
        except Exception as error:
            self.end("failed", f"{type(error).__name__}: {error}".splitlines()[0])
            return None
        if self.tokens not in (None, sample.tokens):
            self.end("failed", f"a run processed {sample.tokens} tokens, the one before {self.tokens}: its work is not fixed")
            return None
        self.tokens = sample.tokens
        return sample

    def end(self, status: Status, why: str) -> None:
        self.status, self.error = status, why

    def seconds(self) -> float:
        return sum(sample.seconds for sample in self.samples)

    def noise(self, protocol: Protocol) -> float:
        return median([s.seconds for s in self.samples], protocol.confidence).relative_half_width

    def spent(self, protocol: Protocol) -> bool:
        """Whether more runs than these are not worth it."""
        return self.seconds() >= protocol.max_time_s or len(self.samples) >= protocol.max_runs

    def complete(self, protocol: Protocol) -> bool:
        """Whether there is enough of it to report, noisy or not."""
        enough = len(self.samples) >= protocol.min_runs and len(set(self.blocks)) >= protocol.blocks
        return enough and (self.seconds() >= protocol.min_time_s or self.spent(protocol))

    def settled(self, protocol: Protocol) -> bool:
        """Whether no further run is due."""
        return self.complete(protocol) and (self.spent(protocol) or self.noise(protocol) <= protocol.noise_target)

    def timing(self, protocol: Protocol) -> Timing:
        return Timing(
            key=self.point.key,
            status=self.status,
            error=self.error,
            tokens=self.tokens or 0,
            samples_s=tuple(s.seconds for s in self.samples),
            device_samples_s=tuple(s.device_seconds for s in self.samples),
            sample_blocks=tuple(self.blocks),
            noisy=self.status == "ok" and not self.noise(protocol) <= protocol.noise_target,
        )


def measure(
    points: Sequence[TimedPoint],
    protocol: Protocol,
    clock: Clock,
    generator: np.random.Generator,
    telemetry: Telemetry | None = None,
) -> list[Timing]:
    """Times points against each other.

    A point that fails leaves the others alone. Under a time budget the points that fit are taken in the order given, for
    half-timed points would be worth nothing; the rest are `skipped`.

    Args:
        points: in order of importance, with different keys.
        protocol: how long and how exactly.
        clock: see `clock_for`.
        generator: draws the orders.
        telemetry: read before and after each block.

    Returns:
        One timing a point, in the order given.
    """
    courses = [_Course(point) for point in points]
    deadline = math.inf if protocol.time_budget_s is None else clock.now() + protocol.time_budget_s
    _warm_up(courses, protocol, clock, deadline)
    ordered: list[_Course] = []
    orders: Iterator[list[int]] = iter(())
    block = 0
    while running := [course for course in courses if course.status == "ok" and not course.settled(protocol)]:
        if clock.now() >= deadline:
            break
        if running != ordered:  # else the square goes on over the blocks
            ordered, orders = running, balanced_orders(len(running), generator)
        if telemetry:
            telemetry.note(block, "before")
        _run_block(running, block, orders, protocol, clock, deadline)
        if telemetry:
            telemetry.note(block, "after")
        block += 1
    for course in courses:
        if course.status == "ok" and not course.complete(protocol):
            course.end("skipped", f"the time budget of {protocol.time_budget_s:g} s ended after {len(course.samples)} runs")
    return [course.timing(protocol) for course in courses]


def _warm_up(courses: list[_Course], protocol: Protocol, clock: Clock, deadline: float) -> None:
    """Warms every point up and skips those for which the budget has no room."""
    promised = 0.0  # seconds that the points let in so far will take
    for number, course in enumerate(courses):
        for _ in range(protocol.warm_ups):
            if course.status == "ok" and clock.now() < deadline and (sample := course.run(clock)):
                course.run_s = sample.seconds
        if course.status == "failed":
            continue
        promised += max(protocol.min_runs * course.run_s, protocol.min_time_s)
        if not clock.now() + promised <= deadline:
            for late in courses[number:]:
                late.end("skipped", f"no room in the time budget of {protocol.time_budget_s:g} s")
            return


def _run_block(
    running: list[_Course], block: int, orders: Iterator[list[int]], protocol: Protocol, clock: Clock, deadline: float
) -> None:
    for _ in range(protocol.runs_per_block):
        for index in next(orders):
            course = running[index]
            if course.status != "ok":
                continue
            if clock.now() >= deadline:
                return
            if sample := course.run(clock):
                course.samples.append(sample)
                course.blocks.append(block)


def balanced_orders(count: int, generator: np.random.Generator) -> Iterator[list[int]]:
    """Endless orders of `count` things: rows of randomised Williams squares.

    In each square every thing stands equally often at every place, and follows every other equally often (Williams 1949):
    `count` rows where it is even, twice as many where it is odd.
    """
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    rows = [[(step + shift) % count for step in zigzag] for shift in range(count)]
    if count % 2:
        rows += [row[::-1] for row in rows]
    while True:
        names = generator.permutation(count)
        for row in generator.permutation(len(rows)):
            yield [int(names[index]) for index in rows[row]]
