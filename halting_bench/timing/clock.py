"""Clocks: what a run took, and what time it is. Injected everywhere, so that no test waits for, or asserts, wall time."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One timed run. `device_seconds` is the device's own account of it (NaN on a CPU)."""

    seconds: float
    device_seconds: float
    tokens: int


class Clock(ABC):
    """A source of seconds."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since some fixed moment, read when all submitted work is done."""

    @abstractmethod
    def time(self, run: Callable[[], int]) -> Sample:
        """Runs once. The clock is read before and after only: nothing inside is synchronised for its sake.

        Args:
            run: does the work and returns how many tokens it processed.
        """


class WallClock(Clock):
    """The CPU's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()

    def time(self, run: Callable[[], int]) -> Sample:
        start = self.now()
        tokens = run()
        return Sample(self.now() - start, math.nan, tokens)


class CudaClock(Clock):
    """The synchronised wall clock, and CUDA events beside it."""

    def __init__(self, device: str = "cuda"):
        import torch

        self._cuda: Any = torch.cuda
        self._device = torch.device(device)

    def now(self) -> float:
        self._cuda.synchronize(self._device)
        return time.perf_counter()

    def time(self, run: Callable[[], int]) -> Sample:
        with self._cuda.device(self._device):
            first, last = (self._cuda.Event(enable_timing=True) for _ in range(2))
            start = self.now()
            first.record()
            tokens = run()
            last.record()
            seconds = self.now() - start
        return Sample(seconds, first.elapsed_time(last) / 1e3, tokens)


class FakeClock(Clock):
    """A clock that stands still until told how long something took."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def time(self, run: Callable[[], int]) -> Sample:
        start = self._now
        tokens = run()
        return Sample(self._now - start, math.nan, tokens)

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        self._now += seconds

    def scripted(self, durations: Iterable[float], tokens: int = 1) -> Callable[[], int]:
        """A run that takes the next of `durations` at each call and processes `tokens`."""
        script = iter(durations)

        def run() -> int:
            self.advance(next(script))
            return tokens

        return run


def clock_for(device: str) -> Clock:
    """The clock of a torch device name."""
    return CudaClock(device) if device.startswith("cuda") else WallClock()
