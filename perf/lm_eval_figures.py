"""What lm-eval's points cost: K replayed points against one traced pass, and against K runs of lm-eval's own.

Seconds are those of the process with one thread, so that other people's work on the machine is left out. The data are
ARC-easy where HALTING_BENCH_DATA points to a folder with arc_easy.jsonl, else questions of the same shape made up here.

Run: python -m perf.lm_eval_figures
"""

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from perf.figure import figure

COMMAND = "python -m perf.lm_eval_figures"
DOCUMENTS = int(os.environ.get("HALTING_BENCH_PERF_DOCUMENTS", "200"))
POINTS = 50
RUNS = 3  # of lm-eval's own, from which the rest is extrapolated
STEPS = 8

TASK = """task: arc_local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def write_task(folder: Path) -> str:
    """Writes the task and its data. Returns what the data are called."""
    home = os.environ.get("HALTING_BENCH_DATA")
    real = Path(home) / "arc_easy.jsonl" if home else None
    if real is not None and real.exists():
        lines = real.read_text(encoding="utf-8").splitlines()[:DOCUMENTS]
    else:
        rng = np.random.default_rng(0)
        words = ["".join(chr(97 + c) for c in rng.integers(26, size=rng.integers(2, 9))) for _ in range(500)]
        rows = [
            {
                "query": "Question: " + " ".join(rng.choice(words, 18)) + "?",
                "choices": [" ".join(rng.choice(words, 4)) for _ in range(4)],
                "gold": int(rng.integers(4)),
            }
            for _ in range(DOCUMENTS)
        ]
        lines = [json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "arc_local.yaml").write_text(TASK.format(path=folder / "rows.jsonl"), encoding="utf-8")
    return "ARC-easy" if real is not None and real.exists() else "made-up multiple-choice"


def measurements() -> list[dict[str, Any]]:
    """Rows for `make perf`."""
    os.environ["TQDM_DISABLE"] = "1"  # of lm-eval's own runs; read when they are imported
    import lm_eval
    import torch

    from halting_bench.architectures.toy import toy_model
    from halting_bench.benchmarks.asks import AnswerSums, Ask, encode_scoring
    from halting_bench.benchmarks.lm_eval_bridge import Suite, answering_model
    from halting_bench.benchmarks.lm_eval_index import task_manager
    from halting_bench.benchmarks.tokenizer import ByteTokenizer
    from halting_bench.engine.replay import Rule, running_extremum
    from halting_bench.engine.trace import TracePlan, trace

    torch.set_num_threads(1)
    model, tokenizer, rule = toy_model(), ByteTokenizer(), Rule("kl", "below")
    plan = TracePlan(("kl",), STEPS, 0)
    results: list[Any] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = write_task(folder)
        suite = Suite(["arc_local"], include_path=folder)
        encoded = encode_scoring(suite.asks, tokenizer, model.spec.max_length)
        kept: list[Any] = []
        traced = seconds(lambda: kept.append(trace(model, encoded.sequences, plan)))
        extremum = running_extremum(kept[0]["score/kl"], rule)
        bounds = np.quantile(extremum[np.isfinite(extremum)], np.linspace(0, 1, POINTS))

        def answers(shard: Any, bound: float, asks: list[Ask], questions: Any) -> AnswerSums:
            stop = np.minimum((running_extremum(shard["score/kl"], rule) >= bound).sum(axis=1) + 1, STEPS) - 1
            rows = np.arange(len(stop))
            sums = AnswerSums(asks, questions, 1)
            sums.add(shard["sequence"], shard["loss"][rows, stop][None], shard["correct"][rows, stop][None])
            return sums

        def all_points() -> None:
            for bound in bounds:
                results.append(suite.score(answers(kept[0], bound, suite.asks, encoded).answers(0))["results"])

        replayed = seconds(all_points)
        last = answers(kept[0], bounds[-1], suite.asks, encoded).answers(0)
        drawn = seconds(lambda: suite.samples(last))

        def one_run(bound: float) -> dict[str, Any]:
            def live(asks: list[Ask]) -> list[Any]:
                questions = encode_scoring(asks, tokenizer, model.spec.max_length)
                found = answers(trace(model, questions.sequences, plan), bound, asks, questions).answers(0)
                return [found[i] for i in range(len(asks))]

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                lm_eval.evaluator.add_env_info = lambda storage: None  # what it asks the machine is not evaluation
                manager = task_manager(["arc_local"], folder)
                done = lm_eval.simple_evaluate(
                    answering_model(live), tasks=["arc_local"], task_manager=manager, bootstrap_iters=0
                )
            return dict(done["results"])

        chosen = np.linspace(0, POINTS - 1, RUNS).astype(int)
        own: list[Any] = []
        separate = seconds(lambda: own.extend(one_run(bounds[point]) for point in chosen)) / RUNS
    equal = all(results[point] == mine for point, mine in zip(chosen, own, strict=True))
    allowed = 1.3 * traced + 0.7 * POINTS
    size = f"{POINTS} points, {DOCUMENTS} {data} documents"
    return [
        figure(f"lm-eval: one traced KL pass, {DOCUMENTS} documents", traced, "s", None, COMMAND),
        figure(f"lm-eval: scoring a replayed point, {size}", replayed / POINTS, "s", "<= 0.7", COMMAND),
        figure(f"lm-eval: scoring one draw of a random control, {DOCUMENTS} {data} documents", drawn, "s", None, COMMAND),
        figure(
            f"lm-eval: trace and replay against 1.3 traces + 0.7 s a point, {size}",
            (traced + replayed) / allowed, "x", "<= 1", COMMAND,
        ),
        figure(
            f"lm-eval: speed against one run a point, {size} ({RUNS} runs measured)",
            POINTS * separate / (traced + replayed), "x", ">= 25", COMMAND,
        ),
        figure("lm-eval: share of the measured runs with equal results", float(equal), "", "== 1", COMMAND),
    ]  # fmt: skip


if __name__ == "__main__":
    for row in measurements():
        print(json.dumps(row))
