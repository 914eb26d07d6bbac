"""Sizes of Kimi delta attention on one rank, and its small weights.

Letters as in ``delta.kernel.shape``; H heads of queries, keys and values alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from kda_mla_kernels.delta.kernel.rule import as_columns
from kda_mla_kernels.delta.kernel.shape import DeltaMemory, DeltaShape

__all__ = ["KdaMemory", "KdaShape", "KdaVectors"]

KdaMemory = DeltaMemory


@dataclass(frozen=True)
class KdaShape(DeltaShape):
    """Heads that each forget by one factor per key channel.

    A record is f32: 3·H·K inputs, and per head K of the key, V of the update and K decays. At 3
    heads of 128 it takes 9,216 bytes a token and layer, where the state takes 196,608.

    Raises:
        ValueError: also key heads that are not as many as value heads.
    """

    kind: ClassVar[str] = "kda"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_heads != self.value_heads:
            raise ValueError(
                f"each value head has a key head of its own, so there cannot be {self.key_heads}"
                f" key heads and {self.value_heads} value heads"
            )

    @property
    def decay_width(self) -> int:
        """H·K."""
        return self.key_width

    @property
    def spread_width(self) -> int:
        """H·K."""
        return self.key_width

    def spread_decays(self, decays: jax.Array) -> jax.Array:
        """As they are: only a single token's can stand as columns."""
        return decays

    def decay_factors(self, row: jax.Array) -> list[jax.Array]:
        """[K, 1] of each head."""
        return jnp.split(as_columns(row, self.key_heads), self.key_heads, axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KdaVectors:
    """Small weights of all layers: arrays outside a kernel, VMEM references inside."""

    taps: Any
    """f32 [Nl, W, C], filters of queries, keys and values; the last tap multiplies the current
    token"""
    slope: Any
    """f32 [Nl, 1, H·K], ``exp(A_log)``, each head's K times"""
    dt_bias: Any
    """f32 [Nl, 1, H·K]"""
    norm: Any
    """f32 [Nl, 1, V]"""
