"""What the runtime's measurements share: the model they run, and medians of interleaved repeats.

Seconds are those of the process: with one thread they are wall seconds of a machine that does nothing else, and other
people's work on the machine is left out.
"""

import random
import statistics
import time
from collections.abc import Callable

import torch

from halting_bench.architectures.huginn import Huginn
from perf.figure import figure

STEPS = 16


def runtime_model() -> Huginn:
    """A 2-4-2 model of width 128 with random weights, and 256 tokens."""
    torch.manual_seed(0)
    config = {
        "n_embd": 128, "n_heads": 4, "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 4, "n_layers_in_coda": 2,
        "intermediate_size": 352, "block_size": 512, "padded_vocab_size": 256, "mean_recurrence": STEPS, "norm_eps": 1e-6,
        "rope_base": 50_000, "qk_bias": True,
    }  # fmt: skip
    return Huginn(config).eval().requires_grad_(False)


def interleaved(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each run. One warm-up each, then every repeat runs all of them in a fresh random order."""
    torch.set_num_threads(1)
    order, seconds = list(runs), {name: [] for name in runs}
    for name in order:
        runs[name]()
    for _ in range(repeats):
        random.shuffle(order)
        for name in order:
            start = time.process_time()
            runs[name]()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def realised_fraction(seconds: dict[str, float]) -> float:
    """Of runs `full` (uniform depth R), `mean` (uniform depth at the policy's mean) and `policy`."""
    return (seconds["full"] - seconds["policy"]) / (seconds["full"] - seconds["mean"])


def measurement(name: str, value: float, unit: str, target: float | None, *, at_least: bool = True, command: str) -> dict:
    """One row for `make perf`. target: None where a number is only shown."""
    return figure(name, float(value), unit, None if target is None else f"{'>=' if at_least else '<='} {target:g}", command)
