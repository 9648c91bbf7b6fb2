"""A run in the JSON of other tools: github-action-benchmark's custom format, and the shape of lm-eval's results."""

import json
import math
from typing import Any

from halting_bench.reporting.frames import chosen_points, is_control, of_pair, pairs, usual_setting
from halting_bench.store import Run


def github_benchmark(run: Run) -> str:
    """For `tool: customSmallerIsBetter`: depth and FLOPs at equal quality, and milliseconds where they were measured."""
    entries = []
    for model, benchmark in pairs(run):
        setting = usual_setting(of_pair(run.latency, model, benchmark))
        for row in _rules(run, model, benchmark):
            name = f"{model}/{benchmark}/{row['policy']}"
            told = f"threshold {row['threshold']:.6g}, quality {row['quality']:.6g}"
            entries.append(
                {"name": f"{name}: mean depth at equal quality", "unit": "core steps/token", "value": row["mean_depth"]}
            )
            entries.append({"name": f"{name}: FLOPs at equal quality", "unit": "FLOP/token", "value": row["flops_per_token"]})
            if setting and not math.isnan(row["latency_ms_per_token"]):
                spread = (row["latency_ms_per_token_hi"] - row["latency_ms_per_token_lo"]) / 2
                seconds = {"unit": "ms/token", "value": row["latency_ms_per_token"], "range": f"± {spread:.3g}"}
                entries.append({"name": f"{name}: latency at equal quality", **seconds})
            for entry in entries:
                entry.setdefault("extra", told)
    return json.dumps(entries, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def lm_eval_results(run: Run) -> str:
    """lm-eval's `results_*.json`: one task a (model, benchmark, policy), at the policy's point of equal quality."""
    results: dict[str, dict[str, Any]] = {}
    configs: dict[str, dict[str, Any]] = {}
    counts: dict[str, dict[str, int]] = {}
    for model, benchmark in pairs(run):
        points = of_pair(run.points, model, benchmark)
        metric, higher = points["metric"].iloc[0], bool(points["higher_is_better"].iloc[0])
        test = points[(points["split"] == "test") & (points["subset"] == "all")]
        for row in _rules(run, model, benchmark):
            task = f"{model}/{benchmark}@{row['policy']}"
            results[task] = {
                "alias": task,
                f"{metric},none": row["quality"],
                f"{metric}_stderr,none": _number((row["quality_hi"] - row["quality_lo"]) / 2 / 1.959964),
                "mean_depth,none": row["mean_depth"],
            }
            aggregate = [{"metric": metric, "aggregation": "mean", "higher_is_better": higher}]
            configs[task] = {"task": task, "metadata": {"threshold": _number(row["threshold"])}, "metric_list": aggregate}
            documents = int(test["n_documents"].max())
            counts[task] = {"original": documents, "effective": documents}
    environment = run.manifest.get("environment", {})
    document = {
        "results": results,
        "configs": configs,
        "n-samples": counts,
        "n-shot": dict.fromkeys(results, 0),
        "config": {"model": "halting-bench", "model_dtype": environment.get("dtype"), "batch_size": None},
        "git_hash": environment.get("commit"),
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _rules(run: Run, model: str, benchmark: str) -> list[dict[str, Any]]:
    frame = chosen_points(run, model, benchmark)
    return frame[(frame["status"] == "ok") & ~frame["policy"].map(is_control)].to_dict("records")


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
