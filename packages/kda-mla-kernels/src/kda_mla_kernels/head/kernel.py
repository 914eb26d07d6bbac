"""The best token of a shard of the vocabulary, inside a kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["best_of_shard"]

CHUNK = 8192
"""Columns that are compared at a time: what a step keeps in registers, not in VMEM."""


def best_of_shard(logits: Any, first: Any, count: Any) -> tuple[jax.Array, jax.Array]:
    """The largest logit of each row and its id; of equal logits the lowest id.

    Args:
        logits: f32 [P, N] of consecutive ids, a reference or an array. A NaN counts as minus
            infinity.
        first: i32, id of column 0.
        count: i32, how many of the columns are ids; the rest is padding.

    Returns:
        f32 [P, 1] values and i32 [P, 1] ids; minus infinity and ``first`` if no column counts.
    """
    rows, columns = logits.shape
    top = jnp.full((rows, 1), -jnp.inf, jnp.float32)
    # Columns are below 2^24, so f32 holds them; the smallest of f32 values is one instruction.
    at = jnp.zeros((rows, 1), jnp.float32)
    for start in range(0, columns, CHUNK):
        value, index = _best(logits[:, start : min(start + CHUNK, columns)], start, count)
        better = value > top
        top, at = jnp.where(better, value, top), jnp.where(better, index, at)
    return top, first + at.astype(jnp.int32)


def _best(part: jax.Array, start: int, count: Any) -> tuple[jax.Array, jax.Array]:
    """Value and column of some columns' best."""
    column = lax.broadcasted_iota(jnp.int32, part.shape, 1) + start
    seen = jnp.where((column < count) & (part == part), part, -jnp.inf)
    top = jnp.max(seen, axis=1, keepdims=True)
    wide = column.astype(jnp.float32)
    return top, jnp.min(jnp.where(seen == top, wide, jnp.inf), axis=1, keepdims=True)
