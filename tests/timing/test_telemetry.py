"""Telemetry reads a device that speaks NVML and is silent elsewhere."""

from types import SimpleNamespace

import numpy as np

from halting_bench.timing.clock import FakeClock
from halting_bench.timing.protocol import Protocol, TimedPoint, measure
from halting_bench.timing.telemetry import Telemetry, telemetry_for


class NVMLError(Exception):
    pass


def refuse(handle):
    raise NVMLError("not supported")


NVML = SimpleNamespace(
    NVMLError=NVMLError,
    NVML_CLOCK_SM=1,
    NVML_CLOCK_MEM=2,
    NVML_TEMPERATURE_GPU=0,
    nvmlDeviceGetPowerUsage=lambda handle: 123_000,
    nvmlDeviceGetClockInfo=lambda handle, kind: {1: 1980, 2: 3201}[kind],
    nvmlDeviceGetTemperature=lambda handle, sensor: 41,
    nvmlDeviceGetCurrentClocksThrottleReasons=refuse,
    nvmlSystemGetDriverVersion=lambda: "999.1",
)


def test_a_cpu_has_no_telemetry():
    assert telemetry_for("cpu") is None


def test_an_unknown_gpu_has_no_telemetry():
    assert Telemetry.open("GPU-00000000-0000-0000-0000-000000000000") is None


def test_what_the_device_does_not_say_is_none():
    reading = Telemetry(NVML, object()).read()
    assert (reading.sm_clock_mhz, reading.memory_clock_mhz, reading.power_w, reading.temperature_c) == (1980, 3201, 123.0, 41)
    assert reading.throttle_reasons is None


def test_it_is_read_before_and_after_each_block():
    clock, telemetry = FakeClock(), Telemetry(NVML, object())
    point = TimedPoint("a", clock.scripted([1.0] * 13))
    measure([point], Protocol(min_runs=12, warm_ups=1), clock, np.random.default_rng(0), telemetry)
    assert [(note["block"], note["moment"]) for note in telemetry.notes] == [
        (block, moment) for block in range(3) for moment in ("before", "after")
    ]
