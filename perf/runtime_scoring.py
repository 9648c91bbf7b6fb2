"""Scoring: of the ideal saving, how much do packed rounds turn into seconds?"""

import numpy as np

from halting_bench.benchmarks.base import Sequence
from halting_bench.engine.score import execute
from halting_bench.engine.scripted import ScriptedExits
from halting_bench.halting.policies import FixedDepth
from halting_bench.halting.policy import HaltingPolicy
from perf.runtime_setup import STEPS, interleaved, measurement, realised_fraction, runtime_model

COMMAND = "python -m perf.runtime_scoring"


def measurements(repeats: int = 5) -> list[dict]:
    """16 sequences of 256 tokens, exits drawn evenly over 1..R, a latent signal computed at every step."""
    model, generator = runtime_model(), np.random.default_rng(0)
    texts = [Sequence(i, i, generator.integers(0, 256, 256), generator.integers(0, 256, 256)) for i in range(16)]

    def score(policy: HaltingPolicy) -> float:
        return float(execute(model, texts, policy, max_steps=STEPS).exit_step.mean())

    scripted = ScriptedExits(1, STEPS)
    depth = score(scripted)
    below, above = int(depth), int(depth) + 1
    seconds = interleaved(
        {
            "full": lambda: score(FixedDepth(STEPS)),
            "below": lambda: score(FixedDepth(below)),
            "above": lambda: score(FixedDepth(above)),
            "policy": lambda: score(scripted),
        },
        repeats,
    )
    seconds["mean"] = (above - depth) * seconds["below"] + (depth - below) * seconds["above"]
    return [
        measurement("scoring_realised_fraction", realised_fraction(seconds), "ratio", 0.85, command=COMMAND),
        measurement("scoring_mean_depth", depth, "core steps a token", None, command=COMMAND),
        measurement("scoring_speedup_over_full_depth", seconds["full"] / seconds["policy"], "ratio", None, command=COMMAND),
    ]


if __name__ == "__main__":
    for row in measurements():
        print(row)
