"""Writing what is cached per position into a cache that stays where it is.

A cache is [N, R, ...]: layers of the kind, rows, and anywhere behind them an axis of L positions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.backend.batch import Batch
from kda_mla_kernels.backend.memory import Slot

__all__ = ["write_positions"]


def write_positions(
    cache: jax.Array, slot: Slot, batch: Batch, fresh: jax.Array, axis: int
) -> jax.Array:
    """Puts values of the live tokens at their positions in one layer.

    Args:
        fresh: [S, T, ...], the rest as in the cache but for its axis of positions.
        axis: of the positions, counted from the end.
    """
    write = _scatter if batch.alone else _put_window
    return write(cache, slot, batch, fresh.astype(cache.dtype), axis)


def _scatter(cache: jax.Array, slot: Slot, batch: Batch, fresh: jax.Array, axis: int) -> jax.Array:
    # Tokens that are not live go to a position behind the cache, which drops them.
    index: list[Any] = [slice(None)] * cache.ndim
    index[:2] = slot, batch.state_rows[:, None]
    index[axis] = jnp.where(batch.live, batch.positions, cache.shape[axis])
    return cache.at[tuple(index)].set(fresh, mode="drop")


def _put_window(
    cache: jax.Array, slot: Slot, batch: Batch, fresh: jax.Array, axis: int
) -> jax.Array:
    """For one sequence, whose tokens have successive positions.

    One window of the cache is read, changed and written back: a scatter into columns would make
    XLA turn the whole cache around.
    """
    tokens, first = batch.shape[1], batch.positions[0, 0]
    # A window that would reach beyond the cache starts earlier; the tokens move behind its start.
    start = jnp.minimum(first, cache.shape[axis] - tokens)
    offset = jnp.arange(tokens) - (first - start)
    written = (offset >= 0) & (offset < jnp.sum(batch.live))

    where: list[Any] = [slot, batch.state_rows[0]] + [0] * (cache.ndim - 2)
    where[axis] = start
    shape = [1, 1, *cache.shape[2:]]
    shape[axis] = tokens
    old = lax.dynamic_slice(cache, where, shape)
    moved = jnp.roll(jnp.moveaxis(fresh[0], 0, axis)[None, None], first - start, axis)
    mask = [1] * cache.ndim
    mask[axis] = tokens
    return lax.dynamic_update_slice(cache, jnp.where(written.reshape(mask), moved, old), where)
