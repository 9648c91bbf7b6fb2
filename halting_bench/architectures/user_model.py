"""Models whose class is the user's own: `my_model.py@MyLoopedModel`, an entry point, or a class shipped with a checkpoint.

See docs/your-own-model.md for a complete example.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from halting_bench.architectures.base import ModelSpec, RecurrentModel
from halting_bench.architectures.files import checked_file
from halting_bench.architectures.weights import Checkpoint, fill, without_memory
from halting_bench.errors import UserError
from halting_bench.plugins import class_in_file, load_class

GROUP = "halting_bench.models"
SHIPPED = "HaltingBenchModel"
"""Key of config.json's `auto_map` by which a checkpoint names its own class: `"file.ClassName"`."""


def build_user_model(target: str, *, dtype: torch.dtype, device: str) -> RecurrentModel:
    """An instance of the user's class, made without arguments: it finds its own weights.

    Raises:
        UserError: there is no such class, it is not a RecurrentModel, or making one raised.
    """
    found = _recurrent(load_class(target, GROUP), target)
    try:
        model = found()
    except Exception as error:  # the user's own constructor: one line, with the cause chained
        raise UserError(f"{target}() raised {type(error).__name__}: {error}") from error
    _check_spec(model, target)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def shipped_class(config: Mapping[str, object]) -> str | None:
    """`file.ClassName` when the checkpoint brings its own class."""
    auto_map = config.get("auto_map")
    name = auto_map.get(SHIPPED) if isinstance(auto_map, dict) else None
    return name if isinstance(name, str) else None


def load_shipped(folder: Path, config: dict, name: str, *, dtype: torch.dtype, device: str) -> RecurrentModel:
    """A model of the class that the checkpoint ships, made from its config. Runs code that came with the weights."""
    module, _, cls = name.rpartition(".")
    found = _recurrent(class_in_file(str(checked_file(folder, f"{module}.py")), cls), name)
    checkpoint = Checkpoint(folder)
    with without_memory():
        model = found.build(config, checkpoint.file_of)
    _check_spec(model, name)
    fill(model, checkpoint, dtype, device)
    return model.eval().requires_grad_(False)


def _recurrent(found: type, target: str) -> type[RecurrentModel]:
    if not issubclass(found, RecurrentModel):
        written = f"class {found.__name__}(RecurrentModel), from {RecurrentModel.__module__}"
        raise UserError(f"{target} is not a RecurrentModel: write {written}")
    missing = sorted(found.__abstractmethods__)
    if missing:
        raise UserError(f"{target} lacks {', '.join(missing)}: write {'them' if len(missing) > 1 else 'it'}")
    return found


def _check_spec(model: RecurrentModel, target: str) -> None:
    if not isinstance(vars(model).get("spec"), ModelSpec):
        raise UserError(f"{target} sets no spec: in its constructor write self.spec = ModelSpec(...)")
