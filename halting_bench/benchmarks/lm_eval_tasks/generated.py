"""Data of the procedural tasks, generated when lm-eval loads them. lm-eval calls `load` with what the YAML gives."""

from typing import TYPE_CHECKING

import numpy as np

from halting_bench.benchmarks.base import NOT_SCORED
from halting_bench.benchmarks.procedural import TASKS

if TYPE_CHECKING:
    from datasets import Dataset

_POSITION_STREAM = 0x706F73  # which position of a sequence is asked about


def load(name: str, documents: int, seed: int, **metadata: object) -> dict[str, "Dataset"]:
    """A test split: of each sequence of a benchmark, one scored position as (prompt, answer, level).

    Args:
        name: a procedural benchmark.
        documents: how many of the benchmark's documents to use.
        seed: of the benchmark.
        metadata: whatever lm-eval knows of the task and the run (it passes all of it); not used.
    """
    from datasets import Dataset

    task = TASKS[name](seed=seed)
    levels = task.subset_names["level"]
    rows = []
    for document in range(documents):
        for sequence in task.sequences(document):
            scored = np.flatnonzero(sequence.targets != NOT_SCORED)
            place = int(np.random.default_rng([_POSITION_STREAM, sequence.uid]).choice(scored))
            rows.append(
                {
                    "prompt": bytes(sequence.tokens[: place + 1].tolist()).decode("ascii"),
                    "answer": chr(sequence.targets[place]),
                    "level": levels[sequence.codes["level"][place]],
                }
            )
    return {"test": Dataset.from_list(rows)}
