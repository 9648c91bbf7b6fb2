"""One operating point run the lm-eval way: its results and samples files, with depth and cost added."""

import json
import re
import textwrap
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from halting_bench.answering import Answered, Point, answer, check_model
from halting_bench.architectures.base import ModelSpec, RecurrentModel
from halting_bench.benchmarks.asks import USUAL_LENGTH
from halting_bench.benchmarks.lm_eval_bridge import Suite
from halting_bench.benchmarks.lm_eval_index import prepare
from halting_bench.benchmarks.lm_eval_results import check_finite, jsonable, logged_sample, metrics_of, task_hashes
from halting_bench.catalog import find_policy
from halting_bench.errors import UserError
from halting_bench.halting.policies import FixedDepth
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.plan import build_policy, plan_policy
from halting_bench.sources import find_model_source
from halting_bench.store import write_bytes
from halting_bench.timing.environment import stamp


@dataclass(frozen=True)
class EvalRequest:
    """What `halting-bench eval` was asked."""

    model: str
    policy: str  # a recipe, or `fixed`
    threshold: float  # of `fixed`: the depth
    tasks: tuple[str, ...]
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: Path | None = None
    gen_kwargs: dict[str, Any] | None = None
    max_steps: int | None = None
    max_length: int | None = None
    kv_mode: str = "latest"
    prefill: str = "adaptive"
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    batch_rows: int = 4096
    slots: int = 32
    offline: bool = False
    confirm_run_unsafe_code: bool = False
    trust_remote_code: bool = False


def evaluate(request: EvalRequest) -> dict[str, Any]:
    """lm-eval's results dictionary of one operating point, samples included; ours is under `halting_bench`.

    Raises:
        UserError: a name is unknown, data cannot be had, or a metric is not a number.
    """
    started = time.time()
    prepare(offline=request.offline)
    source = find_model_source(request.model, trust_remote_code=request.trust_remote_code)
    model = source.load(dtype=getattr(torch, request.dtype), device=request.device)
    tokenizer = source.tokenizer(model.spec.vocab_size)
    check_model(model, tokenizer)
    model_hash = source.hash()  # reads all weights
    point = operating_point(request, model, model_hash)
    suite = Suite(
        request.tasks,
        include_path=request.include_path,
        limit=request.limit,
        num_fewshot=request.num_fewshot,
        gen_kwargs=request.gen_kwargs,
        confirm_run_unsafe_code=request.confirm_run_unsafe_code,
    )
    answered = answer(model, tokenizer, suite.asks, point)
    results = suite.score(answered.answers)
    check_finite(results)
    return (
        results
        | _about(request, source.name, model_hash, model.spec, point, answered, started)
        | {
            "max_length": point.max_length,
            "eot_token_id": tokenizer.end,
        }
    )


def operating_point(request: EvalRequest, model: RecurrentModel, model_hash: str) -> Point:
    """The policy at its threshold, with the caps resolved. Raises UserError when the model cannot run it."""
    spec = model.spec
    trained = spec.mean_recurrence
    steps = request.max_steps or (trained if spec.fixed_recurrence else 4 * trained)
    if spec.fixed_recurrence and steps > trained:
        raise UserError(f"max_steps {steps}: the model has {trained} loops and no more; type at most that")
    length = request.max_length or min(spec.max_length, USUAL_LENGTH)
    if not 2 <= length <= spec.max_length:
        raise UserError(f"max_length {length} must lie in 2..{spec.max_length}, the positions of the model")
    return Point(
        policy=_policy(request, spec, steps, model_hash),
        max_steps=steps,
        max_length=length,
        kv_mode=request.kv_mode,
        prefill=request.prefill,
        seed=request.seed,
        batch_rows=request.batch_rows,
        slots=request.slots,
    )


def _policy(request: EvalRequest, spec: ModelSpec, steps: int, model_hash: str) -> HaltingPolicy:
    if request.policy == "fixed":
        if request.threshold != int(request.threshold) or not 1 <= request.threshold <= steps:
            raise UserError(f"threshold {request.threshold} of policy 'fixed' is a depth: type a whole number in 1..{steps}")
        return FixedDepth(int(request.threshold))
    recipe = find_policy(request.policy)
    reason = plan_policy(recipe, spec, steps, model_hash).not_applicable
    if reason:
        raise UserError(f"policy '{recipe.name}' does not apply to this model: {reason}")
    return build_policy(recipe, request.threshold)


def _about(
    request: EvalRequest, name: str, model_hash: str, spec: ModelSpec, point: Point, answered: Answered, started: float
) -> dict[str, Any]:
    """What lm-eval adds to its results, and ours."""
    arguments = {
        "policy": request.policy,
        "threshold": request.threshold,
        "max_steps": point.max_steps,
        "kv_mode": point.kv_mode,
        "prefill": point.prefill,
        "seed": point.seed,
        "dtype": request.dtype,
    }
    return {
        "config": {
            "model": "halting-bench",
            "model_args": {"model": name, **arguments},
            "model_dtype": request.dtype,
            "batch_size": request.batch_rows,
            "device": request.device,
            "limit": request.limit,
            "bootstrap_iters": 0,
            "gen_kwargs": request.gen_kwargs,
        },
        "date": started,
        "model_source": "halting-bench",
        "model_name": name,
        "model_name_sanitized": sanitized(name),
        "halting_bench": {
            **arguments,
            "model_hash": model_hash,
            "evidence": "executed",
            "mean_recurrence": spec.mean_recurrence,
            "tasks": answered.summary(),
            "environment": stamp(request.device, request.dtype),
            "total_seconds": round(time.time() - started, 3),
        },
    }


def results_table(results: dict[str, Any]) -> str:
    """Metrics of each task, and below them how deep each kind of question went. Fits 80 columns."""
    lines = []
    for name in results["results"]:
        for key, value in metrics_of(results, name).items():
            lines.append(f"{name:24} {key.removesuffix(',none'):28} {value:12.6g}")
    lines.append("")
    for task, kinds in results["halting_bench"]["tasks"].items():
        for kind, figures in kinds.items():
            depth = "no tokens" if figures["mean_depth"] is None else f"mean depth {figures['mean_depth']:.3f}"
            lines.append(f"{task:24} {kind}: {depth} over {figures['tokens']:,} tokens")
            cost = f"{figures['core_steps']:,} core steps, {figures['readouts']:,} readouts (prompts included)"
            cut = f"{figures['truncated_questions']:,} questions cut by {figures['dropped_tokens']:,} tokens"
            ends = f"{figures['exhausted']:,} tokens exhausted, {cut}"
            exits = ", ".join(f"{step}: {count:,}" for step, count in figures["depth_histogram"].items())
            for text in (cost, ends, *([f"tokens by depth: {exits}"] if exits else [])):
                lines += textwrap.wrap(text, 80, initial_indent="    ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def sanitized(name: str) -> str:
    """A model's name as lm-eval's tools expect it for a folder."""
    return re.sub(r"[\"<>:/\|\\?\*\[\]]+", "__", name)


def write_results(results: dict[str, Any], folder: Path, now: datetime | None = None) -> Path:
    """Writes `results_<date>.json` and `samples_<task>_<date>.jsonl` in a folder named after the model, as lm-eval does.

    Returns:
        The results file.
    """
    date = (now or datetime.now(UTC).replace(tzinfo=None)).isoformat().replace(":", "-")
    home = folder / results["model_name_sanitized"]
    for task, samples in results["samples"].items():
        lines = (json.dumps(logged_sample(sample), ensure_ascii=False) for sample in samples)
        write_bytes(home / f"samples_{task}_{date}.jsonl", "".join(f"{line}\n" for line in lines).encode())
    path = home / f"results_{date}.json"
    whole = jsonable({key: value for key, value in results.items() if key != "samples"})
    whole["task_hashes"] = task_hashes(results["samples"])
    write_bytes(path, (json.dumps(whole, indent=2, ensure_ascii=False) + "\n").encode())
    return path
