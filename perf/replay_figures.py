"""What replay costs: all operating points of a benchmark against one uniform pass, and against a live pass a point.

Seconds are those of the process with one thread, so that other people's work on the machine is left out. The model and the
policies are the default sweep's, on its first benchmark, with that benchmark's default sample of documents.

Run: python -m perf.replay_figures
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from perf.figure import figure

COMMAND = "python -m perf.replay_figures"
LIVE_DOCUMENTS = 8
MEMORY_DOCUMENTS = 48


def planned(documents: int | str) -> Any:
    """The plan of the default sweep's first model over so many documents."""
    from halting_bench.jobs import plan_sweep
    from halting_bench.sweep_config import SweepConfig

    return plan_sweep(SweepConfig(models=SweepConfig().models[:1], limit=documents, device="cpu"))


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def replayed(job: Any, unit: Any, model: Any) -> tuple[float, float, int]:
    """Seconds of the trace and of the replay of all points, and how many points there were."""
    from halting_bench.store import RunDirectory
    from halting_bench.unit import open_trace, run_cells, trace_unit

    with tempfile.TemporaryDirectory() as scratch:
        run = RunDirectory(Path(scratch))
        traced = seconds(lambda: trace_unit(run, unit, model, job.benchmark, lambda: None))
        frames: list[Any] = []
        opened = open_trace(run, unit, model, job.benchmark)
        replay = seconds(lambda: frames.extend(run_cells(run, unit, opened, None, lambda: None)))
        rows = [len(f[(f["split"] == "test") & (f["status"] == "ok")]) for f in frames]
    return traced, replay, sum(rows)


def batches(job: Any, unit: Any) -> list[list[Any]]:
    """The unit's sequences in the batches of the trace."""
    from halting_bench.engine.trace import batches_of

    sequences = [s for d in unit.documents for s in unit.draw(job.benchmark.sequences(d))]
    return [[sequences[i] for i in batch] for batch in batches_of(sequences, unit.batch_tokens)]


def one_pass(model: Any, batch: list[Any], unit: Any, policy: Any = None) -> None:
    """R core steps and one readout of the scored tokens; with a policy, which is stepped and never stops anything, the
    readouts that it asks for, and the one of the states that it chose. The least that a live evaluation can do.
    """
    import torch

    from halting_bench.architectures.attention import DenseContext
    from halting_bench.benchmarks.base import NOT_SCORED
    from halting_bench.engine.trace import batch_noise, pad_batch
    from halting_bench.halting.policy import View, undefined_readout

    with torch.inference_mode():
        tokens, targets = pad_batch(batch)
        context = DenseContext(tokens.shape[1], causal=model.spec.causal, lengths=torch.tensor([len(s.tokens) for s in batch]))
        x = model.embed(tokens, context)
        state = model.begin(0, x, batch_noise(model, batch, tokens.shape[1], unit.seed))
        exits = state
        rows = state.shape[0] * state.shape[1]

        def view(k: int) -> View:
            def readout() -> torch.Tensor:
                return model.readout(model.end(0, state, context), context).flatten(0, 1)

            gate = (lambda: model.gate(state.flatten(0, 1))) if model.spec.has_gate else None
            return View(torch.full((rows,), k), state.flatten(0, 1), readout if k else undefined_readout, gate)

        memory = policy.init(view(0)) if policy else None
        running = torch.ones(rows, dtype=torch.bool)
        for k in range(1, unit.max_steps + 1):
            state = model.step(0, state, x, context)
            if policy:
                verdict, memory = policy.step(view(k), memory)
                exits = torch.where(running.view(*tokens.shape, 1), state, exits)
                running &= ~verdict.halt
        scored = targets != NOT_SCORED
        final = exits if policy else state
        log_p = model.readout(model.end(0, final, context), context)[scored].log_softmax(-1)
        log_p.gather(1, targets[scored][:, None])


def live_seconds(model: Any, job: Any, unit: Any) -> tuple[float, int]:
    """Seconds of a live pass a policy and how many were measured: each applicable policy once, at one threshold of its own."""
    from halting_bench.plan import build_policy

    work = batches(job, unit)
    policies = [
        build_policy(plan.recipe, plan.recipe.grid.absolute[0] if plan.recipe.grid.absolute else 0.1)
        for plan in unit.plans
        if not plan.not_applicable and not plan.recipe.python
    ]
    total = sum(seconds(lambda p=p, batch=batch: one_pass(model, batch, unit, p)) for p in policies for batch in work)  # type: ignore[misc]
    return total / len(policies), len(policies)


def ten_times_the_thresholds(unit: Any) -> Any:
    plans = []
    for plan in unit.plans:
        grid = plan.recipe.grid
        more = grid.model_copy(update={"quantiles": min(512, 10 * (grid.quantiles + len(grid.absolute)))})
        plans.append(replace(plan, recipe=plan.recipe.model_copy(update={"grid": more})) if plan.rule else plan)
    return replace(unit, plans=tuple(plans))


def peak_megabytes(documents: int) -> float:
    """Peak resident memory of tracing and replaying so many documents, in a fresh process."""
    argv = [sys.executable, "-m", "perf.replay_figures", str(documents)]
    return float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


def _measure_memory(documents: int) -> float:
    import torch

    from perf.load_memory import resident

    torch.set_num_threads(1)
    job = planned(documents).jobs[0]
    replayed(job, job.units[0], job.source.load())
    return resident("VmHWM") / 1e6


def measurements() -> list[dict]:
    import torch

    torch.set_num_threads(1)
    job = planned("default").jobs[0]
    unit, model = job.units[0], job.source.load()
    work = batches(job, unit)
    uniform = float(np.median([sum(seconds(lambda b=b: one_pass(model, b, unit)) for b in work) for _ in range(3)]))  # type: ignore[misc]
    traced, replay, points = replayed(job, unit, model)
    _, replay_more, more = replayed(job, ten_times_the_thresholds(unit), model)
    few = replace(unit, documents=unit.documents[:LIVE_DOCUMENTS])
    live, policies = live_seconds(model, job, few)
    small, large = peak_megabytes(MEMORY_DOCUMENTS), peak_megabytes(10 * MEMORY_DOCUMENTS)
    sample = f"{job.model_name} on {job.benchmark.name}, {len(unit.documents)} documents"
    rows = [
        (
            "trace and replay of all points over one uniform pass",
            (traced + replay) / uniform,
            "x",
            "<= 3",
            f"{points} points, {sample}",
        ),
        ("the trace alone over one uniform pass", traced / uniform, "x", None, sample),
        (
            "live passes over trace and replay",
            live * len(unit.documents) / LIVE_DOCUMENTS * points / (traced + replay),
            "x",
            ">= 100",
            f"a live pass: mean of {policies} policies on {LIVE_DOCUMENTS} documents, times {points} points; {sample}",
        ),
        (
            "ten times the thresholds over the recipes' own",
            (traced + replay_more) / (traced + replay),
            "x",
            "<= 1.2",
            f"{more} against {points} points, {sample}",
        ),
        (
            "peak memory with ten times the documents",
            large / small,
            "x",
            "<= 1.2",
            f"{large:.0f} MB against {small:.0f} MB, {10 * MEMORY_DOCUMENTS} against {MEMORY_DOCUMENTS} documents",
        ),
    ]
    return [figure(f"{name} ({about})", value, unit, target, COMMAND) for name, value, unit, target, about in rows]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(_measure_memory(int(sys.argv[1])))
    else:
        for row in measurements():
            print(row)
