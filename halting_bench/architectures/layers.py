"""Layers that several families share.

Shapes: `*` row dimensions, D width, H query heads, G key/value heads, E head width, M MLP width.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halting_bench.architectures.attention import AttentionContext
from halting_bench.architectures.base import Flops, rms_norm
from halting_bench.architectures.config import Config, real
from halting_bench.errors import UserError


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on the pairs (i, i + E/2). x: [*, H, E]; cos, sin: [*, 1, E/2], at least float32."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Rotary:
    """Angles of a rotary embedding, computed from the positions (Su et al., arXiv 2104.09864).

    The `llama3` scaling stretches the slow frequencies (Llama 3.1), `linear` all of them; others are refused.
    """

    def __init__(self, head_width: int, base: float, scaling: Mapping[str, object] | None):
        self.head_width = head_width
        self.base = base
        self.scaling = dict(scaling or {})
        self.kind = str(self.scaling.get("rope_type", self.scaling.get("type", "default")))
        if self.kind not in ("default", "linear", "llama3"):
            raise UserError(f"config.json: rope scaling '{self.kind}' is not implemented: known: default, linear, llama3")
        self._frequency: Tensor | None = None

    @classmethod
    def from_config(cls, config: Config, head_width: int) -> "Rotary":
        """Reads `rope_theta` / `rope_scaling`, or the newer `rope_parameters` that holds both."""
        parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(parameters, Mapping):
            raise UserError(f"config.json: rope_scaling is {parameters!r}: it must be an object or null")
        base = real({"rope_theta": parameters.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 10_000.0)
        return cls(head_width, base, parameters)

    def at(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin, [*, 1, E/2], in float32, or float64 when `like` is."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if self._frequency is None or self._frequency.dtype != dtype or self._frequency.device != like.device:
            self._frequency = self._frequencies(dtype, like.device)
        angle = positions.to(dtype).unsqueeze(-1) * self._frequency
        return angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)

    def _frequencies(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        exponent = torch.arange(0, self.head_width, 2, device=device).to(dtype) / self.head_width
        frequency = 1.0 / self.base**exponent
        if self.kind == "default":
            return frequency
        factor = real(self.scaling, "factor")
        if self.kind == "linear":
            return frequency / factor
        low, high = real(self.scaling, "low_freq_factor"), real(self.scaling, "high_freq_factor")
        turns = real(self.scaling, "original_max_position_embeddings") * frequency / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast, kept as it is; 0: slow, divided by the factor
        return frequency * keep + frequency / factor * (1 - keep)


class GroupedAttention(nn.Module):
    """Separate q, k, v and o projections, rotary in halves, G <= H key/value heads."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_width: int, biased: bool = False):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q_proj = nn.Linear(width, heads * head_width, bias=biased)
        self.k_proj = nn.Linear(width, kv_heads * head_width, bias=biased)
        self.v_proj = nn.Linear(width, kv_heads * head_width, bias=biased)
        self.o_proj = nn.Linear(heads * head_width, width, bias=biased)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of a layer's input, [*, G, E]."""
        keys = rotate_halves(self.k_proj(x).unflatten(-1, (self.kv_heads, -1)), *rotary)
        return keys, self.v_proj(x).unflatten(-1, (self.kv_heads, -1))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, context: AttentionContext) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))
        mixed = context.attend(layer, rotate_halves(q, *rotary), *self.keys_values(x, rotary))
        return self.o_proj(mixed.flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, biased: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=biased)
        self.up_proj = nn.Linear(width, hidden, bias=biased)
        self.down_proj = nn.Linear(hidden, width, bias=biased)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def block_flops(width: int, heads: int, kv_heads: int, head_width: int, hidden: int) -> Flops:
    """One layer of grouped attention and a gated MLP: matrix products only, as is the custom."""
    projections = width * head_width * (2 * heads + 2 * kv_heads)
    return Flops(fixed=2 * (projections + 3 * width * hidden), per_context=4 * heads * head_width)


def halting_probability(head: nn.Linear, state: Tensor) -> Tensor:
    """lambda_k = sigmoid(w . s_k + b), [*, D] -> [*]. In at least float32: a bfloat16 sigmoid saturates at 1."""
    dtype = torch.promote_types(state.dtype, torch.float32)
    return torch.sigmoid(F.linear(state.to(dtype), head.weight.to(dtype), head.bias.to(dtype)))[..., 0]
