"""What the GPU says of itself while points are timed: clocks, power, temperature, throttling. Nothing is ever set."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Reading:
    """One look at the device; None where it does not say."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttle_reasons: int | None  # NVML's bit mask; 0: none


class Telemetry:
    """Reads one GPU through NVML (the nvidia-ml-py package)."""

    def __init__(self, nvml: Any, handle: Any):
        self._nvml = nvml
        self._handle = handle
        self.notes: list[dict[str, Any]] = []

    @classmethod
    def open(cls, uuid: str) -> "Telemetry | None":
        """The telemetry of the GPU with this NVML identifier, or None when there is no NVML or no such GPU."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        except pynvml.NVMLError:
            return None

    def note(self, block: int, moment: str) -> None:
        """Keeps a reading in `notes`. moment: "before" or "after" the block."""
        self.notes.append({"block": block, "moment": moment, **asdict(self.read())})

    def driver(self) -> str | None:
        """The driver's version."""
        return self._ask(self._nvml.nvmlSystemGetDriverVersion)

    def read(self) -> Reading:
        """Reads the device now."""
        nvml, handle = self._nvml, self._handle
        power_mw = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return Reading(
            sm_clock_mhz=self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            power_w=None if power_mw is None else power_mw / 1e3,
            temperature_c=self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            throttle_reasons=self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        )

    def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        try:
            return question()
        except self._nvml.NVMLError:
            return None


def telemetry_for(device: str) -> Telemetry | None:
    """The telemetry of a torch device name; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return Telemetry.open(f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid}")
