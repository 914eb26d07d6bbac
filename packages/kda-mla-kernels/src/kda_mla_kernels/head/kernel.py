"""The best token of a shard of the vocabulary, inside a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["best_of_shard"]


def best_of_shard(logits: jax.Array, first: jax.Array, count: jax.Array) -> tuple[jax.Array, ...]:
    """The largest logit of each row and its id; of equal logits the lowest id.

    Args:
        logits: f32 [P, N] of consecutive ids.
        first: i32, id of column 0.
        count: i32, how many of the columns are ids; the rest is padding.

    Returns:
        f32 [P, 1] values, minus infinity if no column counts, and i32 [P, 1] ids.
    """
    column = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    seen = jnp.where(column < count, logits, -jnp.inf)
    top = jnp.max(seen, axis=1, keepdims=True)
    # Columns are below 2^24, so f32 holds them; the smallest of f32 values is one instruction.
    wide = column.astype(jnp.float32)
    at = jnp.min(jnp.where(seen == top, wide, float(logits.shape[1])), axis=1, keepdims=True)
    return top, first + at.astype(jnp.int32)
