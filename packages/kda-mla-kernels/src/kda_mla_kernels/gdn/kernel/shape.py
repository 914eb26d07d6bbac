"""Sizes of a gated delta net on one rank, and its small weights.

Letters as in ``delta.kernel.shape``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from kda_mla_kernels.delta.kernel.rule import split_heads, spread
from kda_mla_kernels.delta.kernel.shape import DeltaMemory, DeltaShape

__all__ = ["GdnMemory", "GdnShape", "GdnVectors"]

GdnMemory = DeltaMemory


@dataclass(frozen=True)
class GdnShape(DeltaShape):
    """Heads that each forget by one factor."""

    kind: ClassVar[str] = "gdn"

    @property
    def decay_width(self) -> int:
        """Hv."""
        return self.value_heads

    @property
    def spread_width(self) -> int:
        """Hv·V."""
        return self.value_width

    def spread_decays(self, decays: jax.Array) -> jax.Array:
        """[P, Hv] -> [P, Hv·V], each head's decay V times."""
        return spread(decays, self.value_dim)

    def decay_factors(self, row: jax.Array) -> list[jax.Array]:
        """[1, V] of each head, equal columns."""
        return split_heads(row, self.value_heads)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GdnVectors:
    """Small weights of all layers: arrays outside a kernel, VMEM references inside."""

    taps: Any
    """f32 [Nl, W, C], the last tap multiplies the current token"""
    a_log: Any
    """f32 [Nl, 1, Hv]"""
    dt_bias: Any
    """f32 [Nl, 1, Hv]"""
    norm: Any
    """f32 [Nl, 1, V]"""
