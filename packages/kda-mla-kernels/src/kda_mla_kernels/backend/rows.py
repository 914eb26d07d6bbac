"""Emptying, copying and restoring one row of the caches.

Caches here have the rank axis in front: rows are the third axis of every part.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from kda_mla_kernels.backend.memory import DeltaCaches

__all__ = ["put_row", "reset_row", "take_row"]


@partial(jax.jit, donate_argnums=0)
def reset_row(caches: DeltaCaches, row: jax.Array) -> DeltaCaches:
    """Zeroes a row. What is cached per position too: a value that is not finite would go through
    the mask, since zero times it is not zero."""
    return jax.tree.map(lambda part: part.at[:, :, row].set(0), caches)


def _where(part: jax.Array, row: jax.Array, axis: int, slots: int) -> tuple[Any, ...]:
    """Selects one row, and of a part with an axis of positions the first slots."""
    index: list[Any] = [slice(None)] * part.ndim
    index[2] = row
    if axis:
        index[axis] = slice(0, slots)
    return tuple(index)


@partial(jax.jit, static_argnums=2)
def take_row(caches: DeltaCaches, row: jax.Array, slots: int) -> DeltaCaches:
    """A copy of one row (without the row axis), with its first ``slots`` positions."""

    def take(part: jax.Array, axis: int) -> jax.Array:
        return part[_where(part, row, axis, slots)]

    return jax.tree.map(take, caches, caches.position_axes())


@partial(jax.jit, donate_argnums=0)
def put_row(caches: DeltaCaches, row: jax.Array, copy: DeltaCaches) -> DeltaCaches:
    """Writes what :func:`take_row` took into a row."""

    def put(part: jax.Array, taken: jax.Array, axis: int) -> jax.Array:
        return part.at[_where(part, row, axis, copy.slots)].set(taken)

    return jax.tree.map(put, caches, copy, caches.position_axes())
