"""The k largest of every row without a branch, a sort or a loop over winners.

A float32 maps to an integer of the same order; the k-th largest integer is found bit by bit, from
the highest, by counting how many keys reach a candidate: 32 counts over whole rows, whatever k is.
A scheduler can put other work between them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["ordered_keys", "top_k_mask"]

_LOWEST = -(2**31)


def ordered_keys(values: jax.Array) -> jax.Array:
    """i32 of the same shape and order as f32 ``values``; both zeros are equal.

    No NaN. A device that flushes subnormals to zero orders them as zero.
    """
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)
    # The sign bit is cleared by the mask: negative floats count downwards.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@partial(jax.jit, static_argnums=1)
def top_k_mask(values: jax.Array, k: int) -> jax.Array:
    """Which entries are among the k largest of their row; of equal ones those of lowest index.

    Args:
        values: f32 [..., E] without NaN. k: 1..E.

    Returns:
        bool [..., E] with k true entries per row.
    """
    keys = ordered_keys(values)

    def reached(candidate: jax.Array) -> jax.Array:
        return jnp.sum(keys >= candidate, axis=-1, keepdims=True) >= k

    zero = jnp.zeros((*keys.shape[:-1], 1), jnp.int32)
    threshold = jnp.where(reached(zero), zero, _LOWEST)

    def refine(step: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold + lax.shift_left(jnp.int32(1), 30 - step)
        return jnp.where(reached(candidate), candidate, threshold)

    threshold = lax.fori_loop(0, 31, refine, threshold)
    above, equal = keys > threshold, keys == threshold
    room = k - jnp.sum(above, axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= room))
