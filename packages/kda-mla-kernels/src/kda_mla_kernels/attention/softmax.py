"""One step of the online softmax over a tile of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kda_mla_kernels.block import by_sublanes
from kda_mla_kernels.numerics import Numerics

__all__ = ["UNSEEN", "Running", "add_tile"]

UNSEEN = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of a slot that a query does not see. Finite, so that differences of two are no NaN."""


class Running(NamedTuple):
    """What the tiles so far amount to, for the N queries of each key/value head, head-major.

    Of a query that has seen no slot, only ``top``, which is ``UNSEEN``, has a meaning.
    """

    top: jax.Array
    """f32 [G·N, 1] largest score"""
    total: jax.Array
    """f32 [G·N, 1] sum of weights relative to it"""
    out: jax.Array
    """f32 [G·N, D] weighted sum of values"""

    @classmethod
    def empty(cls, rows: int, dim: int) -> Running:
        """Before the first tile."""
        column = jnp.zeros((rows, 1), jnp.float32)
        return cls(column + UNSEEN, column, jnp.zeros((rows, dim), jnp.float32))


def add_tile(
    running: Running,
    scores: Sequence[jax.Array],
    values: Sequence[Any],
    visible: jax.Array,
    numerics: Numerics,
) -> Running:
    """Adds a tile. A query that sees nothing of it keeps its bits, if it has seen a slot before.

    Heads go side by side through each phase, so that their products follow each other without
    waiting for one head's softmax.

    Args:
        scores: f32 [N, K] of each key/value head.
        values: references or arrays [K, D] of each.
        visible: bool [N, K].
    """
    n = visible.shape[0]
    seen = jnp.concatenate([jnp.where(visible, x, UNSEEN) for x in scores])
    top = jnp.maximum(running.top, jnp.max(seen, axis=-1, keepdims=True))
    p = numerics.round(jnp.exp(seen - top))
    keep = jnp.exp(running.top - top)
    total = running.total * keep + by_sublanes(_row_sums, p.astype(jnp.float32))
    added = [numerics.dot(p[g * n : (g + 1) * n], x[...]) for g, x in enumerate(values)]
    return Running(top, total, running.out * keep + jnp.concatenate(added))


def _row_sums(x: jax.Array) -> jax.Array:
    """f32 [M, K] -> [M, 1]."""
    return jnp.sum(x, axis=-1, keepdims=True)
