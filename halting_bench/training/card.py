"""A model's card: what it is and its quality by loops, recomputed from its weights.

    python -m halting_bench.training.card models/huginn-tiny

Shapes: B sequences, T positions, V vocabulary.
"""

import argparse
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.nn import functional as F

from halting_bench.architectures.attention import DenseContext
from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.load import load_model
from halting_bench.architectures.noise import initial_noise
from halting_bench.benchmarks.base import NOT_SCORED, Benchmark, Sequence
from halting_bench.benchmarks.tasks import TASKS
from halting_bench.benchmarks.text_sources import PAGE_BENCHMARKS
from halting_bench.errors import unknown_name
from halting_bench.records import Metric
from halting_bench.training.recipe import CORPUS_TASKS, load_recipe

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
DOCUMENTS = 250
PAGES = 60  # of lm-eval: a page is long
NOISE_SEED = 0
SAMPLE_DEPTHS = (1, 4, 8)
SAMPLE_DOCUMENTS = {Metric.ACCURACY: 20, Metric.BITS_PER_BYTE: 2}
BATCH_TOKENS = 4096


def resolve(name: str) -> Benchmark:
    """The benchmark of a card's table."""
    if name in PAGE_BENCHMARKS:
        return PAGE_BENCHMARKS[name]()
    if name not in TASKS:
        raise unknown_name("benchmark", name, [*TASKS, *PAGE_BENCHMARKS])
    return TASKS[name]()


@torch.no_grad()
def scores_by_depth(model: RecurrentModel, sequences: list[Sequence], metric: Metric, depths: tuple[int, ...]) -> np.ndarray:
    """Each position's accuracy (0 or 1) or bits, after each depth's loops.

    Args:
        model: of any family; with several loops, each runs to the depth.
        sequences: of any lengths.
        metric: accuracy, or bits.
        depths: increasing.

    Returns:
        float64 [depths, positions of all the sequences one after another]; NaN where nothing is scored.
    """
    begins = np.cumsum([0, *(len(sequence.tokens) for sequence in sequences)])
    out = np.full((len(depths), begins[-1]), np.nan)
    by_length = defaultdict(list)
    for index, sequence in enumerate(sequences):
        by_length[len(sequence.tokens)].append(index)
    for length, members in sorted(by_length.items()):
        size = max(1, BATCH_TOKENS // length)
        for first in range(0, len(members), size):
            part = members[first : first + size]
            tokens = torch.from_numpy(np.stack([sequences[index].tokens for index in part]))
            targets = torch.from_numpy(np.stack([sequences[index].targets for index in part]))
            uids = np.array([sequences[index].uid for index in part])
            noise = initial_noise(NOISE_SEED, uids[:, None], np.arange(length)[None, :], model.spec.width)
            for row, scores in enumerate(_batch_scores(model, tokens, targets, noise, metric, depths)):
                for index, values in zip(part, scores.double().numpy(), strict=True):
                    out[row, begins[index] : begins[index] + length] = values
    return out


def _batch_scores(
    model: RecurrentModel, tokens: Tensor, targets: Tensor, noise: Tensor, metric: Metric, depths: tuple[int, ...]
) -> list[Tensor]:
    """One [B, T] tensor of scores a depth."""
    found = []
    for logits in _logits_by_depth(model, tokens, noise, depths):
        if metric is Metric.ACCURACY:
            score = (logits.argmax(-1) == targets).float()
        else:
            nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_SCORED, reduction="none")
            score = nats.view_as(targets) / np.log(2)
        found.append(torch.where(targets == NOT_SCORED, torch.nan, score))
    return found


def _logits_by_depth(model: RecurrentModel, tokens: Tensor, noise: Tensor, depths: tuple[int, ...]) -> Iterator[Tensor]:
    """[B, T, V] in float32 at each depth; one loop needs one pass for all of them."""
    if len(model.spec.loops) > 1:
        yield from (model(tokens, depth, noise).float() for depth in depths)
        return
    context = DenseContext(tokens.shape[1], causal=model.spec.causal)
    x = model.embed(tokens, context)
    state = model.begin(0, x, noise.to(x) if model.spec.loops[0].random_start else None)
    for depth in range(1, max(depths) + 1):
        state = model.step(0, state, x, context)
        if depth in depths:
            yield model.readout(model.end(0, state, context), context).float()


def table(model: RecurrentModel, benchmark: Benchmark, limit: int | None, depths: tuple[int, ...] = DEPTHS) -> dict[str, Any]:
    """Quality by loops over the first `limit` documents of seed 0's order, in all and by subset of the first family."""
    documents = benchmark.sample(limit, 0)
    sequences = [sequence for document in documents for sequence in benchmark.sequences(document)]
    scores = scores_by_depth(model, sequences, benchmark.metric, depths)
    family, names = next(iter(benchmark.subset_names.items()))
    codes = np.concatenate([sequence.codes[family] for sequence in sequences])

    def means(chosen: np.ndarray) -> list[float | None]:
        part = scores[:, chosen & ~np.isnan(scores[0])]
        return [round(float(value), 4) for value in part.mean(axis=1)] if part.size else [None] * len(depths)

    return {
        "metric": benchmark.metric.value,
        "documents": len(documents),
        "positions": int((~np.isnan(scores[0])).sum()),
        "depths": list(depths),
        "all": means(np.ones(len(codes), bool)),
        family: {name: means(codes == code) for code, name in enumerate(names) if (codes == code).any()},
    }


def sample(model: RecurrentModel, benchmark: Benchmark) -> dict[str, Any]:
    """The same over a table's first few documents: little enough to recompute in a test."""
    found = table(model, benchmark, SAMPLE_DOCUMENTS[benchmark.metric], SAMPLE_DEPTHS)
    return {key: found[key] for key in ("documents", "positions", "depths", "all")}


def build_card(folder: Path) -> dict[str, Any]:
    """The card of a trained folder: its recipe, its log and the tables recomputed from its weights."""
    recipe = load_recipe(folder / "recipe.yaml")
    last = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    weights = folder / "model.safetensors"
    model = load_model(folder)
    tables = {}
    for name in recipe.benchmarks:
        benchmark = resolve(name)
        tables[name] = table(model, benchmark, PAGES if name in PAGE_BENCHMARKS else DOCUMENTS)
        tables[name]["sample"] = sample(model, benchmark)
        if name in TASKS:
            tables[name]["chance"] = round(TASKS[name].chance, 2)
    parts = [part.task for part in recipe.mixture]
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "family": recipe.family,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "mean_recurrence": model.spec.mean_recurrence,
        "benchmarks": list(recipe.benchmarks),
        "trained_on": [_described(part, last) for part in parts],
        "training": {
            "recipe": "recipe.yaml",
            "seed": recipe.seed,
            "steps": last["step"],
            "tokens": last["tokens"],
            "minutes": round(last["seconds"] / 60, 1),
            "device": f"{recipe.threads} CPU core" if last.get("device", "cpu") == "cpu" else last["device"],
        },
        "weights": weights.name,
        "weights_dtype": recipe.export,
        "weights_bytes": weights.stat().st_size,
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "tables": tables,
        "tables_from": f"python -m halting_bench.training.card models/{folder.name}",
        "cannot": recipe.cannot,
    }


def _described(part: str, last: dict[str, Any]) -> str:
    if part not in CORPUS_TASKS:
        names = TASKS[part]().subset_names["level"]
        return f"procedural task '{part}', whose curriculum reached level {names[last['level'][part]]} of {trained_range(part)}"
    corpus = last.get("corpus") or {}
    asked = {"text": "text", "masked": "hidden bytes of text"}[part]
    return f"{asked} of the packages in recipe.yaml ({corpus.get('bytes', 0)} bytes, sha256 {corpus.get('sha256', 'unknown')})"


def trained_range(name: str) -> str:
    """The name of a task's hardest trained level."""
    task = TASKS[name]()
    return task.subset_names["level"][task.trained - 1]


def write_card(folder: Path) -> Path:
    """Writes card.yaml beside the weights; its numbers are computed here and nowhere else."""
    card = build_card(folder)
    path = folder / "card.yaml"
    partial = path.with_suffix(".yaml.partial")
    partial.write_text(yaml.dump(card, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True))
    os.replace(partial, path)
    return path


class _Dumper(yaml.SafeDumper):
    """Lists of numbers stay on one line."""


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    flat = all(isinstance(item, int | float | None) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


_Dumper.add_representer(list, _represent_list)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Recomputes and writes a model folder's card.yaml.")
    parser.add_argument("folder", type=Path)
    print(write_card(parser.parse_args().folder))
