"""Tensors of a checkpoint folder, read through a memory map. Never unpickles, never follows a link out of the folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from halting_bench.architectures.files import checked_file, read_json
from halting_bench.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DERIVED = ("freqs_cis", "rotary_emb.inv_freq")
"""Ends of names of tables that some checkpoints hold (Huginn-0125 does) and every model here computes from its config."""

WINDOW_BYTES = 32 * 2**20
"""A fresh map is opened after this many bytes: pages already copied leave the process, so nothing is in memory twice."""


class Checkpoint:
    """Where each tensor of a folder is, its shape and dtype; from one file or from shards with an index.

    Raises UserError when a file is missing, empty, truncated, pickled, a link out of the folder, or not what the index says.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for path, promised in _shards(folder):
            with _opened(path) as file:
                names = set(file.keys())
                if promised is not None and promised != names:
                    name = min(promised ^ names)
                    where = "is named by the index but absent" if name in promised else "is not named by the index"
                    raise UserError(f"{path}: tensor {name} {where}: download index and shards again")
                for name in sorted(names):
                    if name.endswith(DERIVED):
                        continue
                    header = file.get_slice(name)
                    self.file_of[name] = path
                    self.shapes[name] = tuple(header.get_shape())
                    self.dtypes[name] = header.get_dtype()

    @property
    def files(self) -> list[Path]:
        """Every weight file, in order of name."""
        return sorted(set(self.file_of.values()))

    @property
    def nbytes(self) -> int:
        """Size of the weight files on disk."""
        return sum(path.stat().st_size for path in self.files)

    def read(self, name: str, into: Tensor) -> None:
        """Copies a tensor, converting it to the dtype and device of `into`, a window of rows at a time."""
        path = self.file_of[name]
        if into.dim() == 0 or into.shape[0] == 0:
            with _opened(path) as file:
                into.copy_(file.get_tensor(name))
            return
        row_bytes = max(1, into[0].numel() * 8)
        rows = max(1, WINDOW_BYTES // row_bytes)
        for start in range(0, into.shape[0], rows):
            with _opened(path) as file:
                into[start : start + rows].copy_(file.get_slice(name)[start : start + rows])


DRAWS = (
    Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_,
)  # fmt: skip


class _Undrawn(TorchFunctionMode):
    """Draws no initial values: on the meta device that does nothing but import the compiler, which takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside it modules are built without memory for their weights."""
    with torch.device("meta"), _Undrawn():
        yield


def fill(model: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> None:
    """Gives a model built on the meta device its weights. Tied parameters stay tied.

    Raises UserError when a tensor is missing, unexpected, of another shape than the config says, not floating point, or
    when two tensors that the config ties differ.
    """
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    shape_of = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    _check(checkpoint, list(names_of.values()), shape_of)
    for names in names_of.values():
        found = [name for name in names if name in checkpoint.file_of]
        value = torch.empty(shape_of[found[0]], dtype=dtype, device=device)
        checkpoint.read(found[0], value)
        for other in found[1:]:
            again = torch.empty_like(value)
            checkpoint.read(other, again)
            if not torch.equal(value, again):
                raise UserError(
                    f"{checkpoint.folder}: {found[0]} and {other} differ, but config.json ties them: "
                    "set tie_word_embeddings to false, or get the config that came with the weights"
                )
        parameter = nn.Parameter(value, requires_grad=False)
        for name in names:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, parameter)


def _check(checkpoint: Checkpoint, groups: list[list[str]], shape_of: dict[str, tuple[int, ...]]) -> None:
    missing = sorted(names[0] for names in groups if not any(name in checkpoint.file_of for name in names))
    extra = sorted(set(checkpoint.file_of) - set(shape_of))
    if missing or extra:
        what = "; ".join(
            f"{kind} {len(items)} ({items[0]}{', ...' if len(items) > 1 else ''})"
            for kind, items in (("lacks", missing), ("has unknown", extra))
            if items
        )
        raise UserError(f"{checkpoint.folder} does not match its config.json: {what}; get the config of these weights")
    for name, shape in checkpoint.shapes.items():
        if shape != shape_of[name]:
            raise UserError(
                f"{checkpoint.file_of[name]}: {name} is {list(shape)}, config.json says {list(shape_of[name])}: "
                "use the config that came with the weights"
            )
        if checkpoint.dtypes[name] not in FLOATING:
            raise UserError(
                f"{checkpoint.file_of[name]}: {name} has dtype {checkpoint.dtypes[name]}: only {', '.join(FLOATING)} are read; "
                "convert the checkpoint (quantised weights are not supported)"
            )


def _shards(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Each weight file, with the tensors that the index promises in it (None: there is no index)."""
    if (folder / SINGLE).exists() or (folder / SINGLE).is_symlink():
        yield checked_file(folder, SINGLE), None
        return
    if not (folder / INDEX).exists():
        others = sorted(p.name for p in folder.glob("*") if p.suffix in PICKLED)
        if others:
            raise UserError(f"{folder} has only pickled weights ({others[0]}), which are never opened: convert to safetensors")
        loose = sorted(p.name for p in folder.glob("*.safetensors"))
        if loose:
            raise UserError(f"{folder} has {loose[0]} but no {INDEX}: download the index, or name a single file {SINGLE}")
        raise UserError(f"no {SINGLE} in {folder}: put the weights there")
    weight_map = read_json(checked_file(folder, INDEX)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise UserError(f"{folder / INDEX} has no weight_map from tensor to file: download it again")
    paths = {shard: checked_file(folder, shard) for shard in sorted(set(weight_map.values()))}
    for shard, path in paths.items():
        yield path, {name for name, file in weight_map.items() if file == shard}


@contextmanager
def _opened(path: Path) -> Iterator:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({error}): download it again") from None
