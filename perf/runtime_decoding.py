"""Decoding: the realised saving of 64 rows, what a policy costs one row, and how a naive loop compares."""

import gc
import resource
from collections.abc import Iterator

import numpy as np
import torch

from halting_bench.architectures.noise import initial_noise
from halting_bench.engine.decode import decode, stream
from halting_bench.engine.kv_cache import Workspace
from halting_bench.engine.meter import Meter
from halting_bench.engine.requests import Request
from halting_bench.engine.scripted import ScriptedExits
from halting_bench.halting.policies import FixedDepth, ThresholdPolicy
from halting_bench.halting.policy import HaltingPolicy
from perf.runtime_naive import decode_naively
from perf.runtime_setup import STEPS, interleaved, measurement, realised_fraction, runtime_model

COMMAND = "python -m perf.runtime_decoding"
PROMPT = 32
HALF = ScriptedExits(1, STEPS - 1)
"""Exits drawn evenly over 1..R - 1: a mean depth of half of R."""


class Workload:
    """Rows decoded side by side, the prompt at full depth, in K/V memory that its runs share."""

    def __init__(self, rows: int, new_tokens: int, max_steps: int = STEPS):
        self.model, self.workspace = runtime_model(), Workspace()
        self.rows, self.new_tokens, self.max_steps = rows, new_tokens, max_steps
        self.prompts = np.random.default_rng(0).integers(0, 256, (rows, PROMPT))
        places = np.arange(PROMPT + new_tokens)[None]
        self.noise = initial_noise(0, np.arange(rows)[:, None], places, self.model.spec.width).float()

    def ours(self, policy: HaltingPolicy, meter: Meter | None = None, new_tokens: int | None = None) -> list[list[int]]:
        results = decode(
            self.model,
            self.prompts.tolist(),
            policy,
            max_new_tokens=new_tokens or self.new_tokens,
            max_steps=self.max_steps,
            slots=self.rows,
            prefill="full",
            meter=meter,
            workspace=self.workspace,
        )
        return [result.tokens for result in results]

    def naive(self, policy: HaltingPolicy) -> list[list[int]]:
        prompts = torch.from_numpy(self.prompts)
        return decode_naively(self.model, prompts, self.noise, policy, new_tokens=self.new_tokens, max_steps=self.max_steps)


def decoding(repeats: int = 3, rows: int = 64, new_tokens: int = 128) -> list[dict]:
    """64 rows, prompt 32, 128 new tokens, mean depth half of R."""
    work = Workload(rows, new_tokens)
    seconds = interleaved(
        {
            "full": lambda: work.ours(FixedDepth(STEPS)),
            "mean": lambda: work.ours(FixedDepth(STEPS // 2)),
            "policy": lambda: work.ours(HALF),
            "lock step": lambda: work.ours(FixedDepth(STEPS - 1)),  # of 64 such exits the deepest is 14.98 on average
        },
        repeats,
    )
    return [
        measurement("decoding_realised_fraction", realised_fraction(seconds), "ratio", 0.85, command=COMMAND),
        measurement("decoding_seconds", seconds["policy"], "s", None, command=COMMAND),
        measurement("decoding_lock_step_seconds", seconds["lock step"], "s", None, command=COMMAND),
    ]


def one_row(repeats: int = 9, new_tokens: int = 64) -> list[dict]:
    """What watching costs a single row, a core step: rules that never fire against a fixed depth of half of R."""
    work = Workload(1, new_tokens, STEPS // 2)
    never = {name: ThresholdPolicy(name, -1.0) for name in ("latent-diff", "kl")}
    seconds = interleaved(
        {
            "fixed": lambda: work.ours(FixedDepth(STEPS // 2)),
            "latent": lambda: work.ours(never["latent-diff"]),
            "kl": lambda: work.ours(never["kl"]),
            "prompt": lambda: work.ours(FixedDepth(STEPS // 2), new_tokens=1),
        },
        repeats,
    )
    fixed = seconds["fixed"] - seconds["prompt"]
    meter = Meter()
    work.ours(never["kl"], meter)
    return [
        measurement(
            "one_row_latent_overhead",
            (seconds["latent"] - seconds["fixed"]) / fixed,
            "share",
            0.05,
            at_least=False,
            command=COMMAND,
        ),
        measurement("one_row_kl_overhead", (seconds["kl"] - seconds["fixed"]) / fixed, "share", None, command=COMMAND),
        measurement("one_row_kl_readouts", meter.readouts / meter.core_steps, "readouts a core step", None, command=COMMAND),
    ]


def against_a_naive_loop(repeats: int = 3, new_tokens: int = 128) -> list[dict]:
    """Tokens a second over those of a loop with dictionaries and one host read a row, which makes the same tokens."""
    one, many = Workload(1, new_tokens), Workload(64, new_tokens)
    if one.ours(HALF) != one.naive(HALF):
        raise RuntimeError("the naive loop makes other tokens: the comparison means nothing")
    seconds = interleaved(
        {
            "one": lambda: one.ours(HALF),
            "naive one": lambda: one.naive(HALF),
            "many": lambda: many.ours(HALF),
            "naive many": lambda: many.naive(HALF),
        },
        repeats,
    )
    return [
        measurement("one_row_over_naive", seconds["naive one"] / seconds["one"], "ratio", 1.5, command=COMMAND),
        measurement("rows_64_over_naive_one", 64 * seconds["naive one"] / seconds["many"], "ratio", 8.0, command=COMMAND),
        measurement("rows_64_over_naive_64", seconds["naive many"] / seconds["many"], "ratio", 1.7, command=COMMAND),
    ]


def long_queue(count: int = 10_000, new_tokens: int = 16) -> list[dict]:
    """Sequences through 64 slots: each answered once, and no more memory at the end than after the first tenth."""
    model, generator = runtime_model(), np.random.default_rng(0)

    def queue() -> Iterator[Request]:
        for uid in range(count):
            yield Request(uid, generator.integers(0, 256, 4), new_tokens)

    how = {"max_prompt": 4, "max_new_tokens": new_tokens, "max_steps": 4, "slots": 64}
    answered = np.zeros(count, np.int64)
    early = 0
    for number, result in enumerate(stream(model, queue(), ScriptedExits(1, 3), **how)):  # type: ignore[arg-type]
        answered[result.uid] += len(result.tokens) == new_tokens
        if number == count // 10:
            gc.collect()
            early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / early - 1
    return [
        measurement("long_queue_peak_memory_growth", growth, "share", 0.02, at_least=False, command=COMMAND),
        measurement("long_queue_answered_once", float((answered == 1).mean()), "share", 1.0, command=COMMAND),
    ]


def measurements() -> list[dict]:
    return [row for measure in (one_row, long_queue, decoding, against_a_naive_loop) for row in measure()]


if __name__ == "__main__":
    for row in measurements():
        print(row)
