"""Families whose layers come from the `transformers` library (an optional extra).

The library's own submodules are called one by one, so that a loop can be stopped, read out and resumed; its attention
goes through the context of the forward, so that the rows may be dense, packed or cached. No remote code runs.
Shapes: `*` row dimensions ([B, T], or [N] packed), H query heads, G key/value heads, E head width, D width.
"""

from abc import abstractmethod
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import RecurrentModel
from halting_bench.architectures.config import Config
from halting_bench.errors import UserError

ATTENTION = "halting_bench"
"""The name under which `attend_through_context` is registered with the library."""


def attend_through_context(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: AttentionContext,
    layer: int,
    packed: bool,
    scaling: float,
    **_: object,  # dropout, window, ...: the library hands every attention function more than it needs
) -> tuple[Tensor, None]:
    """The library's attention interface. query: [B, H, T, E]; key, value: [B, G, T, E]. Returns [B, T, H, E]."""
    q, k, v = (part.transpose(1, 2) for part in (query, key, value))
    q = q * (scaling * q.shape[-1] ** 0.5)  # a context scales by E**-0.5
    if packed:
        return context.attend(layer, q[0], k[0], v[0])[None].contiguous(), None
    return context.attend(layer, q, k, v).contiguous(), None


class TransformersModel(RecurrentModel):
    """A model built around one of the library's classes, whose submodules its subclasses call."""

    library_class: ClassVar[str]
    attention: ClassVar[str] = ATTENTION
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    unused: ClassVar[tuple[str, ...]] = ()  # prefixes of tensors that checkpoints hold and no loop needs

    @classmethod
    @abstractmethod
    def check(cls, config: Config) -> None:
        """Raises UserError for a config that must not reach the library: absurd layer counts, unsupported options."""

    def run(self, layer: nn.Module, x: Tensor, context: AttentionContext, *, number: int, **extra: Any) -> Tensor:
        """One of the library's layers on rows [*, D]; packed rows pass through it as one batch entry.

        Args: number: the layer's number in this forward, for the context. extra: what else this layer takes.
        """
        packed = x.dim() == 2
        out = layer(x[None] if packed else x, attention_mask=None, context=context, layer=number, packed=packed, **extra)
        return out[0] if packed else out


def positions_of(context: AttentionContext) -> Tensor:
    """The rows' positions as the library's rotary embeddings take them: [1, T], or [1, N] packed."""
    return context.positions if context.positions.dim() == 2 else context.positions[None]


def linear_flops(modules: Iterable[nn.Module]) -> float:
    """FLOPs a row of every linear layer inside the modules."""
    return sum(2 * part.weight.numel() for module in modules for part in module.modules() if isinstance(part, nn.Linear))


def load_backed(
    family: type[TransformersModel], folder: Path, config: Config, dtype: torch.dtype, device: str
) -> TransformersModel:
    """Loads a checkpoint through the library, in one copy.

    Raises:
        UserError: the library is not installed or too old, or config and tensors do not fit.
    """
    family.check(config)
    if dtype not in family.dtypes:
        known = ", ".join(str(each).removeprefix("torch.") for each in family.dtypes)
        raise UserError(f"model_type '{config['model_type']}' runs in {known}, not in {str(dtype).removeprefix('torch.')}")
    if find_spec("transformers") is None:
        raise UserError(
            f"model_type '{config['model_type']}' runs through transformers, which is not installed: "
            "pip install 'halting-bench[transformers]'"
        )
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    library_class = getattr(transformers, family.library_class, None)
    if library_class is None:
        raise UserError(f"transformers {transformers.__version__} lacks {family.library_class}: pip install -U transformers")
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend_through_context)
    try:
        inner, report = library_class.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=family.attention,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RuntimeError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"{folder} cannot be loaded as {family.library_class}: {line[:300]}") from None
    missing = sorted(report["missing_keys"])
    extra = sorted(name for name in report["unexpected_keys"] if not name.startswith(family.unused))
    if missing or extra:
        what = f"lacks {len(missing)} ({missing[0]}, ...)" if missing else f"has unknown {len(extra)} ({extra[0]}, ...)"
        raise UserError(f"{folder} does not match its config.json: {what}: use the config that came with the weights")
    return family(inner.to(device))
