"""The sweep: models x benchmarks x policies x seeds -> a run directory.

Traces each (model, benchmark, seed) once, replays every policy from the trace, and assembles the tables. Whatever is
already on disk is kept, so the same command resumes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from halting_bench import catalog
from halting_bench.analysis.pareto import mark_fronts
from halting_bench.analysis.selection import iso_rows, mark_iso
from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.load import load_model, read_config
from halting_bench.benchmarks.base import Benchmark
from halting_bench.details import Selected, convergence_frame, decile_edges, document_rows, histogram_frame, subset_families, subset_rows
from halting_bench.engine.controls import fixed_exits, oracle_exits, saturation_exits
from halting_bench.engine.points import ExitSource, TracedUnit
from halting_bench.engine.replay import running_extremum, signed_threshold, tally_exits, tally_thresholds
from halting_bench.errors import UserError
from halting_bench.plan import PolicyPlan, plan_policy
from halting_bench.records import POINT_COLUMNS, SCHEMA_VERSION, digest
from halting_bench.store import RunDirectory, open_run, read_manifest, write_frame, write_json
from halting_bench.timing.environment import stamp
from halting_bench.unit import Unit, cell_count, open_trace, read_curves, run_cells, trace_unit

if TYPE_CHECKING:
    import pandas as pd


class Progress(Protocol):
    """Told what is under way; the command line draws bars, a notebook may ignore it."""

    def start(self, what: str, total: int) -> Callable[[], None]:
        """Begins a piece of work of `total` parts; the result is called once a finished part."""


class Silent:
    """No progress shown."""

    def start(self, what: str, total: int) -> Callable[[], None]:
        return lambda: None


@dataclass(frozen=True)
class Job:
    """One (model, benchmark): its units are one a seed."""

    model_name: str
    folder: Path
    model_hash: str
    benchmark: Benchmark
    benchmark_hash: str
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class Plan:
    """What a sweep will do, before it does it."""

    config: catalog.SweepConfig
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


def plan_sweep(config: catalog.SweepConfig) -> Plan:
    """Resolves names, devices and defaults. Raises UserError for anything misspelt, before any work is done."""
    import torch

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' was asked for and this machine has none that torch sees: use --device cpu")
    names = config.policies or (*catalog.policy_names(), *catalog.plugin_names())
    recipes = [catalog.find_policy(name) for name in dict.fromkeys(names)]
    doubled = {recipe.name for recipe in recipes if [r.name for r in recipes].count(recipe.name) > 1}
    if doubled:
        raise UserError(f"two policies are called '{min(doubled)}': rename one of them")
    jobs = []
    for name in config.models:
        folder, card = catalog.find_model(name)
        model_hash = hash_model(folder)
        model = load_model(folder, dtype=getattr(torch, config.dtype), device="cpu")
        wanted = config.benchmarks or card.benchmarks or ("docs",)
        jobs += [_plan_job(config, recipes, card.name, folder, model_hash, model, benchmark) for benchmark in wanted]
    identity = {
        "config": catalog.show(config) | {"device": device, "keep_trace": None, "plots": None},
        "jobs": [[job.model_hash, job.benchmark_hash, job.units[0].max_steps] for job in jobs],
        "policies": [catalog.show(recipe) for recipe in recipes],
        "schema": SCHEMA_VERSION,
        "version": stamp()["halting_bench"],
    }
    return Plan(config, device, tuple(jobs), digest(identity))


def _plan_job(
    config: catalog.SweepConfig,
    recipes: list[catalog.PolicyRecipe],
    model_name: str,
    folder: Path,
    model_hash: str,
    model: RecurrentModel,
    benchmark_name: str,
) -> Job:
    benchmark = catalog.find_benchmark(benchmark_name)
    spec = model.spec
    if len(spec.loops) > 1:
        raise UserError(f"model '{model_name}' has {len(spec.loops)} loops: its early exits cannot be replayed")
    max_steps = config.max_steps or (spec.mean_recurrence if spec.fixed_recurrence else 4 * spec.mean_recurrence)
    if spec.fixed_recurrence and max_steps > spec.mean_recurrence:
        raise UserError(f"model '{model_name}' has {spec.mean_recurrence} loops and no more: max_steps {max_steps} is too large")
    if max_steps < spec.mean_recurrence:
        raise UserError(f"max_steps {max_steps} is below the trained depth {spec.mean_recurrence} of '{model_name}': give at least that")
    plans = tuple(plan_policy(recipe, spec, max_steps) for recipe in recipes)
    sample = benchmark.default_sample
    limit, each = (sample.documents, sample.sequences) if config.limit == "default" else (config.limit, None)
    units = []
    for seed in config.seeds:
        documents = tuple(benchmark.sample(None if limit == "all" else int(limit), config.seeds[0]))
        if len(documents) < 2:
            raise UserError(f"benchmark '{benchmark.name}' has {len(documents)} document: two are needed, to calibrate and to test")
        key = f"{model_name}/{_slug(benchmark.name)}/{seed}"
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
                shard_documents=config.shard_documents,
                batch_tokens=config.batch_tokens,
                plans=plans,
            )
        )
    return Job(model_name, folder, model_hash, benchmark, digest(benchmark.manifest()), tuple(units))


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)


def hash_model(folder: Path) -> str:
    """The identity of a checkpoint: its config and the bytes of its weights."""
    import hashlib

    content = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            content.update(hashlib.file_digest(file, "sha256").digest())
    return digest({"config": read_config(folder), "weights": content.hexdigest()})


def sweep(config: catalog.SweepConfig | None = None, *, out: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Runs a sweep, or resumes it.

    Args:
        config: what to do; none: the embedded default.
        out: the run directory; none: results/<run id> below the current directory.
        progress: told what is under way.

    Returns:
        The run directory: read it with `load_run`.

    Raises:
        UserError: something asked for does not exist or does not fit, or the directory cannot be written.
    """
    plan = plan_sweep(config or catalog.SweepConfig())
    folder = Path(out) if out is not None else Path("results") / plan.run_id
    with open_run(folder) as run:
        known = read_manifest(folder, missing_ok=True)
        if known and known["run_id"] != plan.run_id:
            raise UserError(f"{folder} holds another run ({known['run_id']}, not {plan.run_id}): choose another --out")
        if not known:
            write_json(run.part("manifest.json"), manifest(plan))
        run.log("started", run_id=plan.run_id)
        _run_jobs(run, plan, progress or Silent())
        run.log("finished", run_id=plan.run_id)
    return folder


def manifest(plan: Plan) -> dict[str, Any]:
    """What manifest.json says: the resolved request and the machine."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": plan.run_id,
        "config": catalog.show(plan.config),
        "plan": plan.summary(),
        "models": [
            {"model": job.model_name, "model_hash": job.model_hash, "mean_recurrence": job.units[0].mean_recurrence}
            for job in {job.model_name: job for job in plan.jobs}.values()
        ],
        "benchmarks": [
            {"benchmark": job.benchmark.name, "benchmark_hash": job.benchmark_hash, "manifest": job.benchmark.manifest()}
            for job in {job.benchmark.name: job for job in plan.jobs}.values()
        ],
        "policies": [catalog.show(policy.recipe) for policy in plan.jobs[0].units[0].plans],
        "environment": stamp(plan.device, plan.config.dtype),
    }


def _run_jobs(run: RunDirectory, plan: Plan, progress: Progress) -> None:
    import torch

    total = sum(unit.shard_count() for job in plan.jobs for unit in job.units)
    traced = progress.start("trace", total)
    replayed = progress.start("replay", sum(cell_count(unit) for job in plan.jobs for unit in job.units))
    frames: dict[str, list[pd.DataFrame]] = {}
    for job in plan.jobs:
        model = load_model(job.folder, dtype=getattr(torch, plan.config.dtype), device=plan.device)
        try:
            for unit in job.units:
                trace_unit(run, unit, model, job.benchmark, traced)
            opened = [open_trace(run, unit, model, job.benchmark) for unit in job.units]
        except UserError:
            raise
        except Exception as error:
            run.log("trace_failed", model=job.model_name, benchmark=job.benchmark.name, error=f"{type(error).__name__}: {error}")
            raise
        for index, unit in enumerate(job.units):
            chooser = opened[(index + 1) % len(opened)] if len(opened) > 1 else None
            for name, frame in _finish_unit(run, plan, job, unit, opened[index], chooser, replayed).items():
                frames.setdefault(name, []).append(frame)
        if not plan.config.keep_trace:
            _remove_traces(run, job.units)
    _assemble(run, plan, frames)


def _remove_traces(run: RunDirectory, units: Iterable[Unit]) -> None:
    import shutil

    for unit in units:
        shutil.rmtree(run.part("trace", unit.key), ignore_errors=True)


def _finish_unit(
    run: RunDirectory,
    plan: Plan,
    job: Job,
    unit: Unit,
    traced: TracedUnit,
    chooser: TracedUnit | None,
    advance: Callable[[], None],
) -> dict[str, "pd.DataFrame"]:
    """All frames of one unit."""
    import pandas as pd

    metric = job.benchmark.metric
    rows = pd.concat(run_cells(run, unit, traced, chooser, advance), ignore_index=True)
    mark_iso(rows, metric)
    rows["subset"] = "all"
    rows["metric"], rows["higher_is_better"], rows["evidence"] = metric.value, metric.higher_is_better, "replayed"
    identity = {"model": unit.model_name, "benchmark": unit.benchmark_name, "seed": unit.seed}
    for name, value in identity.items():
        rows[name] = value
    rows["distinct"] = (rows["status"] == "ok") & ~rows.duplicated(["split", "fingerprint"])
    rows["on_front"] = mark_fronts(rows)
    frames = _details(run, plan, job, unit, traced, chooser, rows)
    frames["iso"] = iso_rows(rows, metric, unit.mean_recurrence)
    frames["convergence"] = convergence_frame(traced)
    frames["curves"] = _curves(run, unit)
    for name, frame in frames.items():
        for column, value in reversed(identity.items()):
            if column not in frame:
                frame.insert(0, column, value)
        frames[name] = frame
    return frames


def _curves(run: RunDirectory, unit: Unit) -> "pd.DataFrame":
    import pandas as pd

    found = [
        pd.DataFrame({"policy": policy.recipe.name, "split": split, **arrays})
        for policy in unit.plans
        for split, arrays in read_curves(run, unit, policy.recipe.name).items()
    ]
    columns = ["policy", "split", "threshold", "mean_depth", "quality"]
    return pd.concat(found, ignore_index=True)[columns] if found else pd.DataFrame(columns=columns)


def _selected(unit: Unit, traced: TracedUnit, chooser: TracedUnit | None, rows: "pd.DataFrame") -> Iterable[Selected]:
    """The points whose details are kept, policy by policy."""
    known = rows[(rows["status"] == "ok") & ~rows["policy"].str.startswith("random@")]
    keep = known[
        known["policy"].isin(["fixed", "oracle-loss", "oracle-saturation"])
        | (known["role"] == "iso")
        | (known["on_front"] & (known["split"] == "calibration"))
    ]
    plans = {plan.recipe.name: plan for plan in unit.plans}
    latent = traced.watched_step(False, 0.0)
    documents = len(unit.documents)
    for policy, group in keep.groupby("policy", sort=False):
        thresholds = group["threshold"].drop_duplicates().to_numpy()
        name = str(policy)
        if name == "fixed":
            yield Selected(name, thresholds, _by_exits(fixed_exits(unit.max_steps), thresholds.astype(int) - 1, documents), latent)
        elif name == "oracle-loss":
            every = known.loc[(known["policy"] == name) & (known["split"] == "test"), "threshold"].to_numpy()
            yield Selected(name, thresholds, _by_exits(oracle_exits(chooser), np.searchsorted(every, thresholds), documents), latent)
        elif name == "oracle-saturation":
            yield Selected(name, thresholds, _by_exits(saturation_exits, np.array([0]), documents), latent)
        else:
            plan = plans[name]
            step = traced.watched_step(plan.needs_logits, plan.signal_flops)
            if plan.rule is None:
                source = plan.exits(thresholds.tolist())
                yield Selected(name, thresholds, _by_exits(source, np.arange(len(thresholds)), documents), step)
            else:
                yield _by_threshold(plan, thresholds, traced, documents, step)


def _by_exits(source: ExitSource, which: np.ndarray, documents: int) -> Any:
    def tally(number: int, shard: Any, rows: Any, mask: np.ndarray) -> Any:
        return tally_exits(source(number, shard)[which][:, mask], rows.take(mask), documents)

    return tally


def _by_threshold(
    plan: PolicyPlan, thresholds: np.ndarray, traced: TracedUnit, documents: int, step: tuple[float, float]
) -> Selected:
    rule = plan.rule
    if rule is None:
        raise ValueError("a rule is needed")
    bounds = signed_threshold(thresholds, rule, traced.dtype)
    order = np.argsort(bounds)

    def tally(number: int, shard: Any, rows: Any, mask: np.ndarray) -> Any:
        extremum = running_extremum(shard[f"score/{rule.signal}"][mask], rule)
        return tally_thresholds(extremum, bounds[order], rows.take(mask), documents)

    return Selected(plan.recipe.name, thresholds[order], tally, step)


def _details(
    run: RunDirectory,
    plan: Plan,
    job: Job,
    unit: Unit,
    traced: TracedUnit,
    chooser: TracedUnit | None,
    rows: "pd.DataFrame",
) -> dict[str, "pd.DataFrame"]:
    """Points (with subset rows), per-document figures and exit histograms of one unit."""
    import pandas as pd

    families = subset_families(job.benchmark.subset_names)
    edges = decile_edges(traced)
    told = rows.drop_duplicates(["policy", "threshold"]).set_index(["policy", "threshold"])
    subsets, per_document, exits = [], [], []
    for selected in _selected(unit, traced, chooser, rows):
        frame, histogram = document_rows(traced, selected)
        per_document.append(frame)
        exits.append(histogram_frame(selected.policy, selected.thresholds, "all", histogram))
        for subset, columns, counts in subset_rows(traced, selected, families, edges):
            subsets.append(columns.assign(subset=subset))
            exits.append(histogram_frame(selected.policy, selected.thresholds, subset, counts))
    inherited = ["params", "hits", "min_steps", "role", "metric", "higher_is_better", "evidence", "status", "error"]
    by_subset = pd.concat(subsets, ignore_index=True).assign(split="test", distinct=False)
    by_subset = by_subset.join(told[inherited], on=["policy", "threshold"])
    full = by_subset[(by_subset["policy"] == "fixed") & (by_subset["threshold"] == unit.mean_recurrence)]
    by_subset["quality_full_depth"] = by_subset["subset"].map(full.set_index("subset")["quality"])
    needs_logits = {p.recipe.name: p.needs_logits for p in unit.plans}
    dear = by_subset["policy"].map(needs_logits).fillna(False).astype(bool)
    by_subset["readouts"] = by_subset["core_steps"].where(dear, by_subset["n_tokens"])
    identity = {"model": unit.model_name, "benchmark": unit.benchmark_name, "seed": unit.seed}
    by_subset["on_front"] = mark_fronts(by_subset.assign(**identity))
    points = pd.concat([rows, by_subset], ignore_index=True)
    roles = told["role"]
    constant = {
        **identity,
        "run_id": plan.run_id,
        "model_hash": job.model_hash,
        "scope": "token",
        "max_steps": unit.max_steps,
        "prefill": "adaptive",
        "kv_mode": "full",
        "dtype": plan.config.dtype,
    }
    points = points.assign(**constant)
    points["depth_per_loop"] = points["mean_depth"].map(lambda depth: f"[{depth:.6g}]" if depth == depth else "")
    documents = pd.concat(per_document, ignore_index=True).assign(evidence="replayed")
    documents = documents.join(told["params"], on=["policy", "threshold"])
    histograms = pd.concat(exits, ignore_index=True).join(roles, on=["policy", "threshold"])
    return {"points": points, "per_document": documents, "exits": histograms}


def typed_points(points: "pd.DataFrame") -> "pd.DataFrame":
    """Exactly the columns of a record, in order and of their types; missing counts are 0 where a cell has no figures."""
    points = points.reindex(columns=list(POINT_COLUMNS))
    for name, kind in POINT_COLUMNS.items():
        if kind == "string":
            points[name] = points[name].fillna("").astype("string")
        elif kind == "bool":
            points[name] = points[name].fillna(False).astype(bool)
        elif kind == "int64":
            points[name] = points[name].fillna(0).astype("int64")
        else:
            points[name] = points[name].astype("float64")
    return points


def _assemble(run: RunDirectory, plan: Plan, frames: dict[str, list["pd.DataFrame"]]) -> None:
    """Writes the tables of the whole run; points.parquet last, since its presence says that the run is finished."""
    import pandas as pd

    whole = {name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}
    whole["points"] = typed_points(whole["points"])
    for name in ("per_document", "curves", "convergence", "exits", "iso"):
        write_frame(run.part(f"{name}.parquet"), whole[name])
    write_bytes_csv(run, whole["points"])
    write_frame(run.part("points.parquet"), whole["points"])


def write_bytes_csv(run: RunDirectory, points: "pd.DataFrame") -> None:
    from halting_bench.store import write_bytes

    write_bytes(run.part("points.csv"), points.to_csv(index=False).encode())


