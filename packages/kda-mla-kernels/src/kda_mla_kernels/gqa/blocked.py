"""The online-softmax form of attention, over blocks of a cache that stays where it is.

Source: "Online normalizer calculation for softmax" (Milakov, Gimelshein 2018), as in
"FlashAttention" (Dao et al. 2022). Letters as in ``reference``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.gqa.reference import heads_last, scores, weighted
from kda_mla_kernels.numerics import Numerics

__all__ = ["KEY_BLOCK", "FetchKeys", "blocked_attention"]

KEY_BLOCK = 256
"""Keys per step of the online softmax: part of the rounding tree, see :func:`blocked_attention`."""

FetchKeys: TypeAlias = Callable[[jax.Array | int], tuple[jax.Array, jax.Array]]


def blocked_attention(
    q: jax.Array, fetch: FetchKeys, positions: jax.Array, numerics: Numerics, block: int = KEY_BLOCK
) -> jax.Array:
    """Causal attention by online softmax over blocks of keys, up to the last visible one.

    Rounds as ``plain_attention`` does, relative to the largest score so far. Blocks start at
    multiples of ``block`` from position 0, and a block in which a query sees nothing leaves that
    query's result untouched, so a row's bits do not depend on the longest row of the call.

    Args:
        q: [S, T, H, D].
        fetch: ``fetch(start)`` gives keys [S, G, D, block] and values [S, G, block, D] of the
            slots from ``start`` (traced i32, a multiple of ``block``) on. The cache stays where it
            is: only blocks that some query sees are read. Keys are columns, as a matrix unit takes
            them without turning them around.
        positions: i32 [S, T].

    Returns:
        [S, T, H, D] in the activation dtype.
    """
    s, t, h, d = q.shape
    g = jax.eval_shape(fetch, 0)[0].shape[1]
    grouped = q.reshape(s, t, g, h // g, d)

    def step(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        keys, values = fetch(index * block)
        slots = index * block + jnp.arange(block)
        visible = slots <= positions[:, None, None, :, None]
        seen = jnp.where(visible, scores(grouped, keys, numerics), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(seen, axis=-1, keepdims=True))
        p = numerics.round(jnp.where(visible, jnp.exp(seen - new_top), 0.0))
        keep = jnp.exp(top - new_top)
        total = total * keep + jnp.sum(p.astype(jnp.float32), axis=-1, keepdims=True)
        return new_top, total, out * keep + weighted(p, values, numerics)

    shape = (s, g, h // g, t)
    # Block 0 holds position 0, which every query sees, so the maximum is finite from then on.
    start = (
        jnp.full((*shape, 1), -jnp.inf, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros((*shape, d), jnp.float32),
    )
    blocks = jnp.max(positions) // block + 1
    _, total, out = lax.fori_loop(0, blocks, step, start)
    return heads_last(out / total, numerics)
