"""Small generated lm-eval tasks of every kind, as files."""

import json
from pathlib import Path

import numpy as np
import yaml

from halting_bench.answering import Point
from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.asks import Answer, AnswerSums, Ask, encode_scoring
from halting_bench.benchmarks.tokenizer import ByteTokenizer
from halting_bench.engine.replay import exits_at, running_extremum, signed_threshold
from halting_bench.engine.trace import TracePlan, trace
from halting_bench.plan import PolicyPlan

BYTES = ByteTokenizer()
LENGTH = 48  # positions of a forward: shorter than some questions


def write_tasks(folder: Path) -> Path:
    """Multiple choice, loglikelihood, rolling, generation with filters and repeats, and a group. Returns the folder."""
    rows = [
        {"q": f"number {i} is ", "options": ["odd", "even", "naught é"], "gold": i % 2, "text": f"line {i}\n" * (4 + 3 * i)}
        for i in range(4)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metadata": {"version": 2.0},
    }
    acc = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    choice = {
        "output_type": "multiple_choice",
        "doc_to_text": "q",
        "doc_to_choice": "options",
        "doc_to_target": "gold",
        "fewshot_split": "test",
        "num_fewshot": 1,
        "metric_list": [acc, {**acc, "metric": "acc_norm"}, {**acc, "metric": "acc_mutual_info"}],
    }
    tasks = {
        "choice": choice,
        "choice_b": {**choice, "num_fewshot": 0, "metric_list": [acc]},
        "word": {
            "output_type": "loglikelihood",
            "doc_to_text": "q",
            "doc_to_target": "{{options[0]}}",
            "metric_list": [acc, {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "text",
            "metric_list": [
                {"metric": name, "aggregation": aggregation, "higher_is_better": False}
                for name, aggregation in (("word_perplexity", "weighted_perplexity"), ("bits_per_byte", "bits_per_byte"))
            ],
        },
        "made": {
            "output_type": "generate_until",
            "doc_to_text": "q",
            "doc_to_target": "{{options[0]}}",
            "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 6, "do_sample": True, "temperature": 0.8},
            "repeats": 2,
            "filter_list": [
                {"name": "first", "filter": [{"function": "take_first"}]},
                {"name": "letters", "filter": [{"function": "regex", "regex_pattern": "([a-z])"}, {"function": "take_first"}]},
            ],
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **task}), encoding="utf-8")
    mean = [{"metric": "acc", "weight_by_size": True}]
    group = {"group": "both", "task": ["choice_b", "word"], "aggregate_metric_list": mean}
    (folder / "both.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")
    return folder


def replayed(model: RecurrentModel, plan: PolicyPlan, threshold: float, asks: list[Ask], steps: int) -> dict[int, list[Answer]]:
    """Answers of one replayed point from a pass of its own, the plain way: every row's exit, one after another."""
    if plan.rule is None:
        raise ValueError("a single rule is needed")
    encoded = encode_scoring(asks, BYTES, LENGTH)
    shard = trace(model, encoded.sequences, TracePlan((plan.rule.signal,), steps, 0, batch_tokens=256))
    bound = signed_threshold(np.array([threshold]), plan.rule, shard["loss"].dtype)[0]
    exits = exits_at(running_extremum(shard[f"score/{plan.rule.signal}"], plan.rule), bound)
    stop = np.minimum(exits, steps) - 1
    rows = np.arange(len(stop))
    sums = AnswerSums(asks, encoded, 1)
    sums.add(shard["sequence"], shard["loss"][rows, stop][None], shard["correct"][rows, stop][None])
    return sums.answers(0)


def executed_point(policy: object, steps: int) -> Point:
    """An operating point with small shapes."""
    return Point(policy, steps, LENGTH, batch_rows=64, slots=3)  # type: ignore[arg-type]
