"""Emptying, copying and restoring one row of the caches.

Caches here have the rank axis in front: rows are the third axis of every part.
"""

from __future__ import annotations

from functools import partial

import jax

from megakernel_qwen.xla.caches import Caches

__all__ = ["put_row", "reset_row", "take_row"]


@partial(jax.jit, donate_argnums=0)
def reset_row(caches: Caches, row: jax.Array) -> Caches:
    """Zeroes a row. Keys and values too: a value that is not finite would go through the mask,
    since zero times it is not zero."""
    return jax.tree.map(lambda part: part.at[:, :, row].set(0), caches)


@partial(jax.jit, static_argnums=2)
def take_row(caches: Caches, row: jax.Array, slots: int) -> Caches:
    """A copy of one row (without the row axis), with its first ``slots`` keys and values."""
    one = jax.tree.map(lambda part: part[:, :, row], caches)
    return Caches(one.tail, one.delta, one.keys[..., :slots], one.values[..., :slots, :])


@partial(jax.jit, donate_argnums=0)
def put_row(caches: Caches, row: jax.Array, copy: Caches) -> Caches:
    """Writes what :func:`take_row` took into a row."""
    return Caches(
        tail=caches.tail.at[:, :, row].set(copy.tail),
        delta=caches.delta.at[:, :, row].set(copy.delta),
        keys=caches.keys.at[:, :, row, :, :, : copy.slots].set(copy.keys),
        values=caches.values.at[:, :, row, :, : copy.slots].set(copy.values),
    )
