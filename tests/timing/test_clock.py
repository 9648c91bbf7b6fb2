"""Clocks tell what a run took; the fake one is scripted."""

import math

import pytest

from halting_bench.timing.clock import CudaClock, FakeClock, WallClock, clock_for


def test_the_fake_clock_stands_still_until_told():
    clock = FakeClock()
    assert clock.now() == clock.now() == 0.0
    clock.advance(1.5)
    assert clock.now() == 1.5


def test_a_scripted_run_takes_its_durations_in_turn():
    clock = FakeClock()
    run = clock.scripted([1.0, 3.0], tokens=7)
    first, second = clock.time(run), clock.time(run)
    assert (first.seconds, second.seconds) == (1.0, 3.0)
    assert first.tokens == 7 and math.isnan(first.device_seconds)


def test_the_wall_clock_never_runs_backwards_and_hands_the_tokens_on():
    clock = WallClock()
    sample = clock.time(lambda: 5)
    assert sample.seconds >= 0 and sample.tokens == 5


def test_a_cpu_is_timed_by_the_wall_clock():
    assert isinstance(clock_for("cpu"), WallClock)


@pytest.mark.gpu
def test_cuda_events_and_the_synchronised_wall_clock_agree():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    clock = CudaClock()
    x = torch.randn(4096, 4096, device="cuda")

    def run() -> int:
        for _ in range(20):
            x @ x
        return 1

    clock.time(run)
    sample = clock.time(run)
    assert 0 < sample.device_seconds <= sample.seconds
