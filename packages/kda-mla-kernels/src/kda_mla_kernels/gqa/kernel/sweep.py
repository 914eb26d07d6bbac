"""The pass over a layer's keys and values; rounds as ``gqa.blocked``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kda_mla_kernels.attention.cache import CacheShape
from kda_mla_kernels.attention.softmax import Running, add_tile
from kda_mla_kernels.attention.sweep import CacheSweep
from kda_mla_kernels.gqa.kernel.shape import GqaShape
from kda_mla_kernels.numerics import Numerics

__all__ = ["Sweep", "attend", "cache_shape"]


def cache_shape(shape: GqaShape, held: jnp.dtype, slots: int) -> CacheShape:
    """Keys as columns, values as rows."""
    return CacheShape((shape.kv_heads,), shape.head_dim, shape.head_dim, held, slots)


def attend(
    running: Running, q: jax.Array, tile: tuple[Any, Any], visible: jax.Array, numerics: Numerics
) -> Running:
    """Adds a tile.

    Args:
        q: [G, N, D] in the activation dtype.
        tile: references or arrays, keys [G, D, K] and values [G, K, D].
        visible: bool [N, K].
    """
    keys, values = tile
    heads, _, dim = q.shape
    scores = [numerics.dot(q[g], keys[g]) * dim**-0.5 for g in range(heads)]
    return add_tile(running, scores, [values.at[g] for g in range(heads)], visible, numerics)


class Sweep(CacheSweep):
    """Attention of a block's queries over keys and values."""

    def attend(
        self, running: Running, queries: jax.Array, tile: tuple[Any, Any], visible: jax.Array
    ) -> Running:
        """Adds a tile."""
        return attend(running, queries, tile, visible, self.numerics)

    def result(self, running: Running) -> jax.Array:
        """The weighted mean of the values."""
        return running.out / running.total
