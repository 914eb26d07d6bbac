"""Writing what is cached per position into a cache that stays where it is.

A cache is [N, R, ...]: layers of the kind, rows, and anywhere behind them an axis of L slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.attention.split import Split
from kda_mla_kernels.backend.batch import Batch
from kda_mla_kernels.backend.memory import Slot
from kda_mla_kernels.block import Where

__all__ = ["WHOLE_CACHE", "HeldPositions", "write_positions"]


@dataclass(frozen=True)
class HeldPositions:
    """Which positions the slots of this rank's cache are for.

    Attributes:
        split: how positions are dealt out; None where slot p holds position p.
        holder: this rank's number among those that they are dealt out to, traced.
    """

    split: Split | None = None
    holder: Any = 0

    def counted(self, positions: Any) -> Any:
        """Positions counted from the first one that this rank holds."""
        return positions if self.split is None else self.split.counted(positions, self.holder)

    def where(self, at: Where) -> Where:
        """Sequences with positions counted from the first one that this rank holds."""
        return at if self.split is None else self.split.where(at, self.holder)

    def slots(self, positions: jax.Array) -> jax.Array:
        """The slot of each position, -1 where another rank holds it."""
        return positions if self.split is None else self.split.slot(self.counted(positions))

    def positions(self, slots: jax.Array) -> jax.Array:
        """The position of each slot."""
        if self.split is None:
            return slots
        return self.split.position(slots) + self.holder * self.split.block

    def first_slot(self, position: jax.Array) -> jax.Array:
        """Of those that hold this position or a later one."""
        return position if self.split is None else self.split.count(self.counted(position) - 1)

    def most_slots(self, tokens: int) -> int:
        """Slots that so many consecutive positions take at most."""
        if self.split is None:
            return tokens
        return min(tokens, -(-tokens // self.split.stride) * self.split.block)


WHOLE_CACHE = HeldPositions()


def write_positions(
    cache: jax.Array,
    layer: Slot,
    batch: Batch,
    fresh: jax.Array,
    axis: int,
    held: HeldPositions = WHOLE_CACHE,
) -> jax.Array:
    """Puts values of the live tokens at their positions in one layer.

    Args:
        layer: among those of the cache's kind.
        fresh: [S, T, ...], the rest as in the cache but for its axis of slots.
        axis: of the slots, counted from the end.
        held: positions that this rank holds; the others are dropped.
    """
    write = _scatter if batch.alone else _put_window
    return write(cache, layer, batch, fresh.astype(cache.dtype), axis, held)


def _scatter(
    cache: jax.Array, layer: Slot, batch: Batch, fresh: jax.Array, axis: int, held: HeldPositions
) -> jax.Array:
    # What is not written goes to a slot behind the cache, which drops it.
    slots = held.slots(batch.positions)
    index: list[Any] = [slice(None)] * cache.ndim
    index[:2] = layer, batch.state_rows[:, None]
    index[axis] = jnp.where(batch.live & (slots >= 0), slots, cache.shape[axis])
    return cache.at[tuple(index)].set(fresh, mode="drop")


def _put_window(
    cache: jax.Array, layer: Slot, batch: Batch, fresh: jax.Array, axis: int, held: HeldPositions
) -> jax.Array:
    """For one sequence, whose tokens have successive positions, and so successive slots.

    One window of the cache is read, changed and written back: a scatter into columns would make
    XLA turn the whole cache around.
    """
    first, size = batch.positions[0, 0], held.most_slots(batch.shape[1])
    # A window that would reach beyond the cache starts earlier.
    start = jnp.minimum(held.first_slot(first), cache.shape[axis] - size)
    token = held.positions(start + jnp.arange(size)) - first
    written = (token >= 0) & (token < jnp.sum(batch.live))

    where: list[Any] = [layer, batch.state_rows[0]] + [0] * (cache.ndim - 2)
    where[axis] = start
    shape = [1, 1, *cache.shape[2:]]
    shape[axis] = size
    old = lax.dynamic_slice(cache, where, shape)
    new = jnp.moveaxis(jnp.take(fresh[0], token, axis=0, mode="clip"), 0, axis)[None, None]
    mask = [1] * cache.ndim
    mask[axis] = size
    return lax.dynamic_update_slice(cache, jnp.where(written.reshape(mask), new, old), where)
