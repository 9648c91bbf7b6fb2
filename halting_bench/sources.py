"""What a user may type for a model, and how it is loaded: a bundled name, a folder, a hub id, or a class of their own."""

import hashlib
import inspect
from dataclasses import dataclass
from pathlib import Path

import torch

from halting_bench import catalog
from halting_bench.architectures.base import ModelSpec, RecurrentModel
from halting_bench.architectures.config import read_config
from halting_bench.architectures.hub import fetch, is_hub_id
from halting_bench.architectures.load import load_model
from halting_bench.architectures.user_model import GROUP, build_user_model
from halting_bench.benchmarks.base import Benchmark, Direction
from halting_bench.benchmarks.text import DocumentBenchmark
from halting_bench.benchmarks.tokenizer import Tokenizer, load_tokenizer
from halting_bench.errors import UserError, unknown_name
from halting_bench.plugins import load_class, plugin_names
from halting_bench.records import digest


@dataclass(frozen=True)
class ModelSource:
    """A model reference, resolved. Either `folder` holds a checkpoint, or `target` names a class of the user's."""

    name: str
    folder: Path | None = None
    target: str | None = None
    revision: str | None = None  # commit of the hub repository
    trust_remote_code: bool = False

    def load(self, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> RecurrentModel:
        """The model, for inference. Raises UserError when it cannot be."""
        if self.target is not None:
            return build_user_model(self.target, dtype=dtype, device=device)
        return load_model(self.checkpoint, dtype=dtype, device=device, trust_remote_code=self.trust_remote_code)

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's folder. Raises UserError for a class of the user's, which has none."""
        if self.folder is None:
            raise UserError(f"{self.name} is a class, not a checkpoint folder")
        return self.folder

    def tokenizer(self, vocab_size: int) -> Tokenizer:
        """How the model reads text: by the tokenizer of its checkpoint, or by bytes. Raises UserError when neither fits."""
        config = read_config(self.folder) if self.folder is not None else {}
        return load_tokenizer(self.folder, config, vocab_size)

    def benchmark(self, name: str, spec: ModelSpec) -> Benchmark:
        """A benchmark as this model reads it.

        Raises:
            UserError: an unknown name, a text that it cannot read, or a benchmark for models that see more or less of it.
        """
        found = catalog.find_benchmark(name)
        if spec.causal and found.direction is Direction.BOTH:
            raise UserError(
                f"benchmark '{name}' is for encoders, '{self.name}' sees the left side only: take a non-causal model"
            )
        if not spec.causal and found.direction is Direction.LEFT:
            raise UserError(
                f"benchmark '{name}' asks for the next token, '{self.name}' sees it: take a causal model, or 'masked'"
            )
        if isinstance(found, DocumentBenchmark):
            return found.read_by(self.tokenizer(spec.vocab_size).encoding(), spec.max_length)
        return found

    def hash(self) -> str:
        """The identity of the model: config and bytes of its weights, or the source of the class."""
        content = hashlib.sha256()
        if self.target is not None:
            found = load_class(self.target, GROUP)
            written, at, _ = self.target.rpartition("@")
            content.update(Path(written if at else inspect.getfile(found)).read_bytes())
            return digest({"class": found.__name__, "source": content.hexdigest()})
        for path in sorted(self.checkpoint.glob("*.safetensors")):
            with open(path, "rb") as file:
                content.update(hashlib.file_digest(file, "sha256").digest())
        return digest({"config": read_config(self.checkpoint), "weights": content.hexdigest()})

    def manifest(self) -> dict:
        """What a run writes down about where its model came from."""
        code = self.trust_remote_code and self.target is None
        return {"model": self.name, "revision": self.revision, "class": self.target, "trust_remote_code": code}


def find_model_source(reference: str, *, trust_remote_code: bool = False) -> ModelSource:
    """Resolves a reference; a hub id is fetched (or found in the cache), at the commit that it stands for now.

    Args:
        reference: a bundled model's name, a folder, `file.py@ClassName`, the name of an installed model plug-in, or
            `owner/name[@revision]`. The first that fits wins.
        trust_remote_code: allow a class that the checkpoint ships.

    Raises:
        UserError: it is none of them.
    """
    bundled = catalog.model_names()
    if reference in bundled or Path(reference).is_dir():
        folder, card = catalog.find_model(reference)
        return ModelSource(card.name, folder=folder, trust_remote_code=trust_remote_code)
    file, at, cls = reference.rpartition("@")
    if at and file.endswith(".py"):
        load_class(reference, GROUP)
        return ModelSource(cls, target=reference)
    plugged = plugin_names(GROUP)
    if reference in plugged:
        return ModelSource(reference, target=reference)
    if is_hub_id(reference):
        folder, revision = fetch(reference, with_code=trust_remote_code)
        return ModelSource(reference.partition("@")[0], folder, revision=revision, trust_remote_code=trust_remote_code)
    others = ("a folder with config.json", "a hub id owner/name", "file.py@ClassName")
    raise unknown_name("model", reference, [*bundled, *plugged, *others])
