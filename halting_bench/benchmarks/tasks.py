"""Every procedural task, by name."""

from halting_bench.benchmarks.encoder_tasks import ENCODER_TASKS
from halting_bench.benchmarks.procedural import TASKS as DECODER_TASKS
from halting_bench.benchmarks.procedural import ProceduralTask

TASKS: dict[str, type[ProceduralTask]] = {**DECODER_TASKS, **ENCODER_TASKS}
