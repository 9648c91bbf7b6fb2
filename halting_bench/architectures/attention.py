"""How the rows of one forward see each other.

A block computes q, k and v for its rows and hands them to a context; the context alone knows whether the rows are a
dense batch, packed survivors or decode slots with a cache. So every block is written once.

Shapes: `*` any leading row dimensions (dense: B, T; packed: N), H query heads, G key/value heads, E head width.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F


class AttentionContext(ABC):
    """One forward's rows: where they stand, and whom they attend to."""

    positions: Tensor  # int64, broadcastable to [*]: each row's position in its sequence, 0-based

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends from each row.

        Args:
            layer: the model-wide layer number (prelude first, then core, then coda).
            q: [*, H, E] rotated queries.
            k: [*, G, E] rotated keys.
            v: [*, G, E] values.

        Returns:
            [*, H, E].
        """


class DenseContext(AttentionContext):
    """A batch of whole sequences, no cache: rows are [B, T]. Right padding is invisible to a causal model."""

    def __init__(
        self,
        length: int,
        *,
        causal: bool = True,
        lengths: Tensor | None = None,
        device: torch.device | str = "cpu",
        contain: bool = False,
    ):
        """
        Args:
            length: T.
            causal: mask the future.
            lengths: [B] real lengths, needed only when not causal.
            device: of the rows.
            contain: keep a row that is not finite from rows that do not attend to it: a weight of 0 times NaN is NaN.
        """
        self.positions = torch.arange(length, device=device)
        self.causal = causal
        self.contain = contain
        self.mask = None
        if not causal and lengths is not None:
            self.mask = (self.positions[None, :] < lengths[:, None])[:, None, None, :]  # [B, 1, 1, T]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.contain and not (k.sum() + v.sum()).isfinite():
            lost = ~(k.isfinite() & v.isfinite()).flatten(2).all(dim=2)  # [B, T]
            k, v = (part.masked_fill(lost[..., None, None], 0.0) for part in (k, v))
            return self._dense(q, k, v).masked_fill(self._sees(lost)[..., None, None], torch.nan)
        return self._dense(q, k, v)

    def _sees(self, lost: Tensor) -> Tensor:
        """Which rows attend to one of these. Both bool [B, T]."""
        if self.causal:
            return lost.cummax(dim=1).values
        real = lost if self.mask is None else lost & self.mask[:, 0, 0]
        return real.any(dim=1, keepdim=True).expand_as(lost)

    def _dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=self.mask,
            is_causal=self.causal,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)
