"""Cost, counted: how many rows went through each stage; and, when a clock is given, how long each stage took."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

STAGES = ("embed", "core", "readout", "signal", "bookkeeping")


@dataclass
class Meter:
    """Integer counts over rows. Seconds are exclusive: a readout that a signal asked for is readout time."""

    clock: Callable[[], float] | None = None
    embeds: int = 0
    core_steps: int = 0
    readouts: int = 0
    evaluations: int = 0  # of a policy's signals
    halvings: int = 0  # times that the rows did not fit into memory
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def __post_init__(self) -> None:
        self._stage = "bookkeeping"
        self._since = self.clock() if self.clock else 0.0

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Charges the time inside to a stage."""
        return _UNTIMED if self.clock is None else _Charge(self, name)

    def stop(self) -> None:
        """Charges the time since the last stage to bookkeeping."""
        if self.clock:
            self.switch("bookkeeping")

    def switch(self, name: str) -> str:
        """Charges the time so far to the running stage and starts another. Returns the one that was running."""
        now = self.clock() if self.clock else 0.0
        self.seconds[self._stage] += now - self._since
        outer, self._stage, self._since = self._stage, name, now
        return outer


_UNTIMED = nullcontext()


class _Charge(AbstractContextManager[None]):
    def __init__(self, meter: Meter, name: str):
        self.meter, self.name = meter, name

    def __enter__(self) -> None:
        self.outer = self.meter.switch(self.name)

    def __exit__(self, *raised: object) -> None:
        self.meter.switch(self.outer)
