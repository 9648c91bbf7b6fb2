"""From a folder with config.json and safetensors to a model. Never unpickles, never runs remote code."""

import json
from pathlib import Path

import torch

from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.huginn import Huginn
from halting_bench.errors import UserError, unknown_name

FAMILIES: dict[str, type[RecurrentModel]] = {"huginn_raven": Huginn}
"""model_type of config.json -> class. Each is built from the parsed config and loads the public tensor names."""


def load_model(folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> RecurrentModel:
    """Loads a checkpoint for inference.

    Args:
        folder: holds config.json and model.safetensors.
        dtype: dtype of the weights in memory, whatever the file has.
        device: where they go.

    Raises:
        UserError: the folder, the config or the tensors are not what they must be.
    """
    config = read_config(folder)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise unknown_name("model_type", str(family), FAMILIES)
    model = FAMILIES[family](config)  # type: ignore[call-arg]
    _load_weights(model, folder / "model.safetensors")
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def read_config(folder: Path) -> dict:
    """The parsed config.json. Raises UserError when it is missing or not JSON."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no config.json in {folder}: a model folder holds config.json and model.safetensors") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): mend it or copy it again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a {type(config).__name__}, not an object: copy it again")
    return config


def _load_weights(model: RecurrentModel, path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        pickled = sorted(p.name for p in path.parent.glob("*") if p.suffix in {".bin", ".pt", ".pth", ".ckpt", ".pkl"})
        if pickled:
            raise UserError(f"{path.parent} has only pickled weights ({pickled[0]}), which are never opened: convert to safetensors")
        raise UserError(f"no {path.name} in {path.parent}: put the weights there")
    wanted = dict(model.named_parameters())  # tied parameters appear once, under their first name
    try:
        with safe_open(path, framework="pt") as file:
            found = set(file.keys())
            names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            missing, extra = sorted(set(wanted) - found), sorted(found - names)
            if missing or extra:
                what = "; ".join(
                    f"{kind} {len(items)} ({items[0]}{', ...' if len(items) > 1 else ''})"
                    for kind, items in (("lacks", missing), ("has unknown", extra))
                    if items
                )
                raise UserError(f"{path} does not match its config.json: {what}: use the config that came with the weights")
            for name, parameter in wanted.items():
                tensor = file.get_tensor(name)
                if tensor.shape != parameter.shape:
                    raise UserError(
                        f"{path}: {name} is {list(tensor.shape)}, config.json says {list(parameter.shape)}: "
                        "use the config that came with the weights"
                    )
                with torch.no_grad():
                    parameter.copy_(tensor)
    except SafetensorError as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}): download it again") from None
