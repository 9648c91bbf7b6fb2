"""From what a sweep was asked to what it will do: models, benchmarks and policies resolved, before any work is done."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halting_bench import catalog
from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.base import Benchmark
from halting_bench.engine.kv_cache import KvMode
from halting_bench.engine.prefill import check_prefill
from halting_bench.errors import UserError
from halting_bench.named import named_points, with_points
from halting_bench.plan import folder_name, plan_policy
from halting_bench.records import SCHEMA_VERSION, digest
from halting_bench.sources import ModelSource, find_model_source
from halting_bench.sweep_config import SweepConfig
from halting_bench.timing.environment import stamp
from halting_bench.unit import Unit, cell_count


@dataclass(frozen=True)
class Job:
    """One (model, benchmark): its units are one a seed."""

    model_name: str
    source: ModelSource
    model_hash: str
    benchmark: Benchmark
    benchmark_hash: str
    units: tuple[Unit, ...]
    replayable: bool  # one loop, and later tokens follow earlier ones: an exit changes nothing that others saw


LM_EVAL = "lm-eval:"
"""What names of lm-eval tasks begin with."""


@dataclass(frozen=True)
class Plan:
    """What a sweep will do, before it does it."""

    config: SweepConfig
    device: str
    jobs: tuple[Job, ...]
    run_id: str

    def summary(self) -> dict[str, Any]:
        """What `--dry-run` prints."""
        return {
            "run_id": self.run_id,
            "device": self.device,
            "dtype": self.config.dtype,
            "model_passes": sum(len(job.units) for job in self.jobs),
            "cells": sum(cell_count(unit) for job in self.jobs for unit in job.units),
            "jobs": [
                {
                    "model": job.model_name,
                    "benchmark": job.benchmark.name,
                    "documents": len(job.units[0].documents),
                    "sequences_each": job.units[0].sequences_each,
                    "max_steps": job.units[0].max_steps,
                    "full_depth": job.units[0].mean_recurrence,
                    "seeds": [unit.seed for unit in job.units],
                    "policies": sum(not plan.not_applicable for plan in job.units[0].plans),
                    "not_applicable": {p.recipe.name: p.not_applicable for p in job.units[0].plans if p.not_applicable},
                }
                for job in self.jobs
            ],
        }


_NO_PART_OF_IDENTITY = ("keep_trace", "plots", "latency", "like", "rules")
"""Settings that change no record; the points that `like` and `rules` name stand beside them."""


def plan_sweep(config: SweepConfig) -> Plan:
    """Resolves names, devices and defaults. Raises UserError for anything misspelt, before any work is done."""
    import torch

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' was asked for and this machine has none that torch sees: use --device cpu")
    KvMode.parse(config.kv_mode).executable()
    check_prefill(config.prefill)
    names = config.policies or (*catalog.policy_names(), *catalog.plugin_names())
    recipes = [catalog.find_policy(name) for name in dict.fromkeys(names)]
    doubled = {recipe.name for recipe in recipes if [r.name for r in recipes].count(recipe.name) > 1}
    if doubled:
        raise UserError(f"two policies are called '{min(doubled)}': rename one of them")
    jobs = []
    for name in config.models:
        source = find_model_source(name, trust_remote_code=config.trust_remote_code)
        model = source.load(dtype=getattr(torch, config.dtype))
        wanted = config.benchmarks or _usual_benchmarks(source)
        jobs += [_plan_job(config, recipes, source, model, benchmark) for benchmark in wanted]
    keys = [unit.key for job in jobs for unit in job.units]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"two parts of this sweep would be kept under '{key}': name each model, benchmark and seed once")
    identity = {
        "config": catalog.show(config) | {"device": device} | dict.fromkeys(_NO_PART_OF_IDENTITY),
        "named": [job.units[0].named for job in jobs],
        "jobs": [[job.model_hash, job.benchmark_hash, job.units[0].max_steps] for job in jobs],
        "policies": [catalog.show(recipe) for recipe in recipes],
        "code": {recipe.name: catalog.code_version(recipe) for recipe in recipes if recipe.python or recipe.router},
        "schema": SCHEMA_VERSION,
        "version": stamp()["halting_bench"],
    }
    return Plan(config, device, tuple(jobs), digest(identity))


def _plan_job(
    config: SweepConfig,
    recipes: list[catalog.PolicyRecipe],
    source: ModelSource,
    model: RecurrentModel,
    benchmark_name: str,
) -> Job:
    model_name, spec = source.name, model.spec
    benchmark = _benchmark(config, source, model, benchmark_name)
    max_steps = config.max_steps or (spec.mean_recurrence if spec.fixed_recurrence else 4 * spec.mean_recurrence)
    if spec.fixed_recurrence and max_steps > spec.mean_recurrence:
        raise UserError(
            f"model '{model_name}' has {spec.mean_recurrence} loops and no more: max_steps {max_steps} is too large"
        )
    if max_steps < spec.mean_recurrence:
        raise UserError(
            f"max_steps {max_steps} is below the trained depth {spec.mean_recurrence} of '{model_name}': give at least that"
        )
    replayable = len(spec.loops) == 1 and spec.causal
    named = named_points(config, model_name, benchmark.name, [recipe.name for recipe in recipes])
    model_hash = source.hash()  # reads all weights
    plans = tuple(plan_policy(with_points(recipe, named), spec, max_steps, model_hash) for recipe in recipes)
    sample = benchmark.default_sample if replayable else benchmark.executed_sample
    limit, each = (sample.documents, sample.sequences) if config.limit == "default" else (config.limit, None)
    units = []
    for seed in config.seeds:
        documents = tuple(benchmark.sample(None if limit == "all" else int(limit), config.seeds[0]))
        if len(documents) < 2:
            raise UserError(
                f"benchmark '{benchmark.name}' has {len(documents)} document: two are needed, to calibrate and to test"
            )
        key = f"{model_name}/{folder_name(benchmark.name)}/{seed}"
        units.append(
            Unit(
                key=key,
                model_name=model_name,
                benchmark_name=benchmark.name,
                seed=seed,
                documents=documents,
                sequences_each=each,
                calibration_fraction=config.calibration_fraction,
                max_steps=max_steps,
                mean_recurrence=spec.mean_recurrence,
                shard_tokens=config.shard_tokens,
                batch_tokens=config.batch_tokens,
                plans=plans,
                named=named,
            )
        )
    return Job(model_name, source, model_hash, benchmark, digest(benchmark.manifest()), tuple(units), replayable)


def _benchmark(config: SweepConfig, source: ModelSource, model: RecurrentModel, name: str) -> Benchmark:
    if not name.startswith(LM_EVAL):
        return source.benchmark(name, model.spec)
    from halting_bench.benchmarks.lm_eval_benchmark import LmEvalBenchmark  # lm-eval takes a second to import

    asked = config.lm_eval
    return LmEvalBenchmark(
        name,
        source.tokenizer(model.spec.vocab_size),
        model.spec.max_length,
        include_path=Path(asked.include_path) if asked.include_path else None,
        num_fewshot=asked.num_fewshot,
        offline=asked.offline,
    )


def _usual_benchmarks(source: ModelSource) -> tuple[str, ...]:
    """What a model is asked unless told otherwise: what its card names, else text."""
    card = catalog.find_model(str(source.folder))[1] if source.folder is not None else None
    return (card.benchmarks if card else ()) or ("docs",)


def manifest(plan: Plan) -> dict[str, Any]:
    """What manifest.json says: the resolved request and the machine."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": plan.run_id,
        "config": catalog.show(plan.config),
        "plan": plan.summary(),
        "models": [
            {
                **job.source.manifest(),
                "model_hash": job.model_hash,
                "mean_recurrence": job.units[0].mean_recurrence,
            }
            for job in {job.model_name: job for job in plan.jobs}.values()
        ],
        "benchmarks": [
            {"benchmark": job.benchmark.name, "benchmark_hash": job.benchmark_hash, "manifest": job.benchmark.manifest()}
            for job in {job.benchmark.name: job for job in plan.jobs}.values()
        ],
        "policies": [catalog.show(policy.recipe) for policy in plan.jobs[0].units[0].plans],
        "environment": stamp(plan.device, plan.config.dtype),
    }
