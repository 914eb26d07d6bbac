"""One step of the online softmax over a tile of keys and values; rounds as ``gqa.blocked``."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kda_mla_kernels.numerics import Numerics

__all__ = ["Running", "attend"]

UNSEEN = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of a slot that a query does not see. Finite, so that differences of two are no NaN."""


class Running(NamedTuple):
    """What the tiles so far amount to, for the N queries of a key/value head."""

    top: jax.Array
    """f32 [N, 1] largest score"""
    total: jax.Array
    """f32 [N, 1] sum of weights relative to it"""
    out: jax.Array
    """f32 [N, D] weighted sum of values"""

    @classmethod
    def empty(cls, rows: int, dim: int) -> Running:
        """Before the first tile."""
        column = jnp.zeros((rows, 1), jnp.float32)
        return cls(column + UNSEEN, column, jnp.zeros((rows, dim), jnp.float32))


def attend(
    running: Running,
    q: jax.Array,
    tile: tuple[jax.Array, jax.Array],
    visible: jax.Array,
    numerics: Numerics,
) -> Running:
    """Adds a tile. A query that sees nothing of it keeps its bits, if it has seen a slot before.

    Args:
        q: [N, D]. tile: keys [D, K] and values [K, D]. visible: bool [N, K].
    """
    keys, values = tile
    scores = numerics.dot(q, keys) * q.shape[-1] ** -0.5
    seen = jnp.where(visible, scores, UNSEEN)
    top = jnp.maximum(running.top, jnp.max(seen, axis=-1, keepdims=True))
    p = numerics.round(jnp.exp(seen - top))
    keep = jnp.exp(running.top - top)
    total = running.total * keep + jnp.sum(p.astype(jnp.float32), axis=-1, keepdims=True)
    return Running(top, total, running.out * keep + numerics.dot(p, values))
