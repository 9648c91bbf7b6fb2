"""From a folder with config.json and safetensors to a model. Never unpickles; runs a checkpoint's code only when told to."""

from pathlib import Path

import torch

from halting_bench.architectures.albert import Albert
from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.config import MAX_LAYERS, read_config
from halting_bench.architectures.dory import Dory
from halting_bench.architectures.hrm_text import HrmText
from halting_bench.architectures.huginn import Huginn
from halting_bench.architectures.inkling2_loop import Inkling2Loop, Inkling2LoopMultimodal
from halting_bench.architectures.nanbeige import Nanbeige
from halting_bench.architectures.ouro import Ouro
from halting_bench.architectures.self_transformer import SelfTransformer
from halting_bench.architectures.transformers_backed import TransformersModel, load_backed
from halting_bench.architectures.two_scale import TwoScale
from halting_bench.architectures.user_model import load_shipped, shipped_class
from halting_bench.architectures.weights import Checkpoint, fill, without_memory
from halting_bench.errors import UserError, unknown_name

FAMILIES: dict[str, type[RecurrentModel]] = {
    "huginn_raven": Huginn,
    "nanbeige": Nanbeige,
    "ouro": Ouro,
    "self_transformer": SelfTransformer,
    "two_scale": TwoScale,
}
"""model_type of config.json -> class. Each is built from the parsed config and loads the public tensor names."""

BACKED_FAMILIES: dict[str, type[TransformersModel]] = {
    "albert": Albert,
    "dory": Dory,
    "hrm_text": HrmText,
    "inkling2_loop": Inkling2LoopMultimodal,
    "inkling2_loop_text": Inkling2Loop,
}
"""model_type -> class, for families whose layers come from the optional `transformers`."""


def load_model(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", trust_remote_code: bool = False
) -> RecurrentModel:
    """Loads a checkpoint for inference.

    The model is built without memory for its weights, every tensor is checked against the file headers, and only then
    are the weights read, once, straight into their dtype and device.

    Args:
        folder: holds config.json and model.safetensors, or shards with model.safetensors.index.json.
        dtype: dtype of the weights in memory, whatever the file has.
        device: where they go.
        trust_remote_code: run the class that the checkpoint ships, if it ships one.

    Raises:
        UserError: the folder, the config or the tensors are not what they must be.
    """
    config = read_config(folder)
    family = config.get("model_type")
    shipped = shipped_class(config)
    if shipped is not None and family not in FAMILIES:
        if not trust_remote_code:
            raise UserError(f"{folder} brings its own class ({shipped}): read that code, then add --trust-remote-code")
        return load_shipped(folder, config, shipped, dtype=dtype, device=device)
    if family not in FAMILIES and family not in BACKED_FAMILIES:
        raise unknown_name("model_type", str(family), (*FAMILIES, *BACKED_FAMILIES))
    checkpoint = Checkpoint(folder)
    if family in BACKED_FAMILIES:
        backed = load_backed(BACKED_FAMILIES[family], folder, config, dtype, device)
        _check_loops(backed, folder)
        return backed.eval().requires_grad_(False)
    try:
        with without_memory():
            model = FAMILIES[family].build(config, checkpoint.file_of)
    except RuntimeError as error:  # a size that overflows; nothing has been allocated
        raise UserError(f"{folder / 'config.json'} describes an impossible model ({error}): check its sizes") from None
    _check_loops(model, folder)
    fill(model, checkpoint, dtype, device)
    return model.eval().requires_grad_(False)


def _check_loops(model: RecurrentModel, folder: Path) -> None:
    """Loops take no memory of their own, but every pass would run them all."""
    loops = model.spec.mean_recurrence
    if loops > MAX_LAYERS:
        raise UserError(f"{folder / 'config.json'} asks for {loops} loops: more than {MAX_LAYERS} are refused; check the file")
