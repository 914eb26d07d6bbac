"""The pass over a layer's keys and values; rounds as ``gqa.blocked``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kda_mla_kernels.attention.cache import Cache, CacheShape
from kda_mla_kernels.attention.softmax import Running
from kda_mla_kernels.attention.sweep import CacheSweep, Scores
from kda_mla_kernels.gqa.kernel.shape import GqaShape

__all__ = ["Sweep", "cache_shape"]


def cache_shape(shape: GqaShape, held: jnp.dtype, slots: int) -> CacheShape:
    """Keys as columns, values as rows."""
    return CacheShape((shape.kv_heads,), shape.head_dim, shape.head_dim, held, slots)


class Sweep(CacheSweep):
    """Attention of a block's queries over keys and values."""

    def scores(self, queries: jax.Array, tile: Cache) -> Scores:
        """Products with the keys of each key/value head, divided by the root of the head dim."""
        scale = self.cache.column_dim**-0.5
        return [self.numerics.dot(q, tile.columns[g]) * scale for g, q in enumerate(queries)]

    def result(self, running: Running) -> jax.Array:
        """The weighted mean of the values."""
        return running.out / running.total
