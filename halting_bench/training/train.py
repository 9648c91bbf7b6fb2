"""Trains a model from a recipe: random depth, truncated back-propagation, a curriculum, atomic checkpoints.

Every random choice of a step is drawn from generators seeded by (seed, step): a killed and resumed run is the run that was
never killed, bit for bit on one machine. Tensors are stored as safetensors, counters as JSON; nothing is pickled.

Shapes: B sequences, T positions, D width, V vocabulary.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.huginn import Huginn
from halting_bench.architectures.self_transformer import SelfTransformer
from halting_bench.architectures.two_scale import TwoScale
from halting_bench.benchmarks.base import NOT_SCORED, Sequence
from halting_bench.diagnosis import diagnose, summary
from halting_bench.errors import UserError
from halting_bench.records import digest
from halting_bench.store import make_folder
from halting_bench.training import corpus as corpora
from halting_bench.training.data import Batch, Mixture
from halting_bench.training.data import Progress as Curriculum
from halting_bench.training.objective import draw_depth, objective
from halting_bench.training.recipe import CORPUS_TASKS, Recipe, load_recipe
from halting_bench.training.weights import export, initialise

FAMILIES: dict[str, Callable[[dict], RecurrentModel]] = {
    "huginn_raven": Huginn,
    "self_transformer": SelfTransformer,
    "two_scale": TwoScale,
}
LOGGED_DEPTHS = (1, 2, 4, 8, 16, 32)
CHECKPOINT = "checkpoint.safetensors"


@dataclass
class Counters:
    """All of a run's state that is not a tensor."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curriculum: Curriculum = field(default_factory=Curriculum)


def train(recipe_path: Path, out: Path, *, device: str = "auto", resume: bool = True) -> Path:
    """Trains the recipe's model and writes it to a folder.

    Args:
        recipe_path: the YAML recipe.
        out: the folder; holds config.json, model.safetensors, recipe.yaml, log.jsonl and, until the end, a checkpoint.
        device: "cpu", "cuda" or "auto".
        resume: go on from the folder's checkpoint; False starts over.

    Returns:
        `out`. A finished run is left as it is when resumed.
    """
    recipe = load_recipe(recipe_path)
    chosen = pick_device(device)
    torch.set_num_threads(recipe.threads)
    make_folder(out)
    if not resume:
        for name in (CHECKPOINT, "model.safetensors", "log.jsonl"):
            (out / name).unlink(missing_ok=True)
    run = Run(recipe, chosen, out)
    if (out / "model.safetensors").exists() and not (out / CHECKPOINT).exists():
        return out
    shutil.copyfile(recipe_path, out / "recipe.yaml")
    run.restore()
    run.loop()
    export(run.model, recipe, out)
    (out / CHECKPOINT).unlink(missing_ok=True)
    return out


def pick_device(device: str) -> torch.device:
    """Resolves "auto" to CUDA where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"unknown device '{device}': type 'cpu', 'cuda' or 'auto'")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device '{device}' asked for, but this torch sees no GPU: type '--device cpu'")
    return torch.device(device)


class Run:
    """One training run: model, optimizers, data and counters."""

    def __init__(self, recipe: Recipe, device: torch.device, out: Path):
        self.recipe, self.device, self.out = recipe, device, out
        self.identity = digest(recipe.model_dump(mode="json", exclude={"checkpoint_every", "summary", "cannot", "benchmarks"}))
        self.model = FAMILIES[recipe.family](recipe.config)
        wrong, sides = ("masked", "the left side only") if self.model.spec.causal else ("text", "both sides")
        if wrong in {part.task for part in recipe.mixture}:
            raise UserError(f"task '{wrong}' is not for '{recipe.family}', which sees {sides}: take another task or family")
        if recipe.halting and not self.model.spec.has_gate:
            raise UserError(f"'halting: {recipe.halting.kind}' trains a head that no '{recipe.family}' has: take huginn_raven")
        longest = self.model.spec.max_length
        if recipe.window > longest and any(part.task in CORPUS_TASKS for part in recipe.mixture):
            raise UserError(f"window {recipe.window} is longer than the {longest} positions of '{recipe.family}': give fewer")
        initialise(self.model, recipe.seed)
        self.model.to(device)
        corpus = corpora.build(recipe.corpus) if recipe.corpus and any(p.task in CORPUS_TASKS for p in recipe.mixture) else None
        self.corpus_manifest = corpus.manifest if corpus else None
        self.mixture = Mixture(recipe, corpus)
        self.counters = Counters(curriculum=self.mixture.start())
        self.parameters = dict(self.model.named_parameters())
        vectors = ("wte", "lm_head", "halting_head")  # of tokens, or one alone: two-dimensional, but no maps of states
        matrices = {name for name, p in self.parameters.items() if p.ndim == 2 and not any(part in name for part in vectors)}
        rules = recipe.optimizer
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(
                [p for name, p in self.parameters.items() if name in matrices],
                lr=rules.muon_lr, momentum=0.95, weight_decay=rules.muon_decay, adjust_lr_fn="original",
            ),
            "adamw": torch.optim.AdamW(
                [p for name, p in self.parameters.items() if name not in matrices],
                lr=rules.adam_lr, betas=(0.9, 0.95), weight_decay=0.0,
            ),
        }  # fmt: skip
        self.rates = {"muon": rules.muon_lr, "adamw": rules.adam_lr}

    def loop(self) -> None:
        """Steps until the recipe's last one."""
        recipe, counters = self.recipe, self.counters
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            shown = bar.add_task(recipe.name, total=recipe.steps, completed=counters.step)
            while counters.step < recipe.steps:
                begun = time.perf_counter()
                self.step()
                counters.seconds += time.perf_counter() - begun
                bar.update(shown, completed=counters.step)
                last = counters.step == recipe.steps
                if counters.step % recipe.log_every == 0 or last:
                    bar.update(shown, description=self.log())
                if counters.step % recipe.checkpoint_every == 0 or last:
                    self.save()

    def step(self) -> float:
        """One optimizer step; returns its loss."""
        recipe, counters = self.recipe, self.counters
        rng = np.random.default_rng([recipe.seed, counters.step])
        depths = [draw_depth(recipe, rng) for _ in self.model.spec.loops]
        batches = self.mixture.draw(rng, counters.curriculum)
        total = 0.0
        for batch, share in zip(batches, self.mixture.share, strict=True):
            tokens, targets = self._tensors(batch)
            noise = self._noise(tokens.shape, int(rng.integers(2**62)))
            with self._precision():
                loss, predicted = objective(self.model, tokens, targets, noise, depths, recipe)
            (loss * float(share)).backward()
            self.mixture.learn(counters.curriculum, batch, (predicted == targets).cpu().numpy(), min(depths))
            counters.tokens += tokens.numel()
            total += float(share) * float(loss.detach())
        nn.utils.clip_grad_norm_(self.parameters.values(), recipe.optimizer.clip)
        rate = self._rate()
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self.rates[name] * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        counters.step += 1
        return total

    @torch.no_grad()
    def log(self) -> str:
        """Appends the held-out loss and accuracy by depth to log.jsonl; returns a line for the progress bar."""
        counters = self.counters
        held_out, shown = {}, []
        for name in self.mixture.names:
            batch = self.mixture.held_out(name)
            loss, accuracy = self._by_depth(batch)
            held_out[name] = {"loss": loss, "accuracy": accuracy}
            shown.append(f"{name} " + "/".join(f"{value:.2f}" for value in loss.values()))
        entry: dict[str, Any] = {"step": counters.step, "tokens": counters.tokens, "seconds": round(counters.seconds, 1)}
        entry |= {"held_out": held_out, "level": counters.curriculum.level}
        if len(self.model.spec.loops) > 1:
            entry["dynamics"] = self._dynamics()
        if counters.step == self.recipe.steps:
            entry |= {"device": self.device.type, "torch": torch.__version__, "corpus": self.corpus_manifest}
        with (self.out / "log.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return f"{self.recipe.name} " + ", ".join(shown)

    def _by_depth(self, batch: Batch) -> tuple[dict[str, float], dict[str, float]]:
        tokens, targets = self._tensors(batch)
        loss, accuracy = {}, {}
        scored = torch.from_numpy(batch.hardest).to(self.device) & (targets != NOT_SCORED)
        with self._precision():
            for depth in LOGGED_DEPTHS:
                logits = self.model(tokens, depth, self._noise(tokens.shape, 0))[scored].float()
                loss[str(depth)] = round(float(F.cross_entropy(logits, targets[scored])), 4)
                accuracy[str(depth)] = round(float((logits.argmax(-1) == targets[scored]).float().mean()), 4)
        return loss, accuracy

    def _dynamics(self) -> dict[str, Any]:
        """How states move within and between loops, on the first task's held-out batch."""
        batch = self.mixture.held_out(self.mixture.names[0])
        pairs = enumerate(zip(batch.tokens, batch.targets, strict=True))
        return summary(diagnose(self.model, [Sequence(i, i, tokens, targets) for i, (tokens, targets) in pairs]))

    def save(self) -> None:
        """Writes the whole run to one file, atomically: tensors as safetensors, counters as JSON in its header."""
        tensors = {f"model/{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for label, optimizer in self.optimizers.items():
            for name, parameter in self.parameters.items():
                for key, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"{label}/{name}/{key}"] = value
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        header = {"counters": json.dumps(asdict(self.counters)), "recipe": self.identity}
        partial = self.out / f"{CHECKPOINT}.partial"
        save_file(tensors, partial, metadata=header)
        os.replace(partial, self.out / CHECKPOINT)

    def restore(self) -> None:
        """Goes on from the folder's checkpoint, if there is one; log lines written after it are dropped."""
        path, log = self.out / CHECKPOINT, self.out / "log.jsonl"
        if not path.exists():
            log.unlink(missing_ok=True)
            return
        with safe_open(path, framework="pt") as file:
            header = file.metadata()
        if header["recipe"] != self.identity:
            raise UserError(f"'{path}' is of another recipe: give another output folder, or start over with --no-resume")
        state = json.loads(header["counters"])
        self.counters = Counters(**(state | {"curriculum": Curriculum(**state["curriculum"])}))
        tensors = load_file(path)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"model/{name}"])
        for label, optimizer in self.optimizers.items():
            for name, parameter in self.parameters.items():
                prefix = f"{label}/{name}/"
                kept = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
                if kept:
                    moved = {key: value if key == "step" else value.to(self.device) for key, value in kept.items()}
                    optimizer.state[parameter] = moved
        if log.exists():
            lines = [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= self.counters.step]
            log.write_text("".join(line + "\n" for line in lines))

    def _tensors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(batch.tokens).to(self.device), torch.from_numpy(batch.targets).to(self.device)

    def _noise(self, shape: torch.Size, seed: int) -> Tensor:
        noise = torch.empty(*shape, self.model.spec.width)
        nn.init.trunc_normal_(noise, a=-3, b=3, generator=torch.Generator().manual_seed(seed))
        return noise.to(self.device)

    def _rate(self) -> float:
        rules, step, steps = self.recipe.optimizer, self.counters.step, self.recipe.steps
        warm = min(1.0, (step + 1) / max(1, rules.warmup_steps))
        fall = min(1.0, (steps - step) / max(1.0, rules.cooldown * steps))
        return warm * max(rules.final, fall)

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        low = self.recipe.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=low):
            yield
