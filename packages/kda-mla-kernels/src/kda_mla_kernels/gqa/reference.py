"""Causal attention of a few query tokens over cached keys and values.

Letters: S sequences, T query tokens, H query heads, G key/value heads, D head dim, L key slots.
Query head h reads key/value head ``h // (H / G)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.numerics import Numerics

__all__ = ["KEY_BLOCK", "FetchKeys", "blocked_attention", "plain_attention"]

KEY_BLOCK = 256
"""Keys per step of the online softmax: part of the rounding tree, see :func:`blocked_attention`."""

FetchKeys: TypeAlias = Callable[[jax.Array | int], tuple[jax.Array, jax.Array]]


def _exact_einsum(formula: str, a: jax.Array, b: jax.Array, numerics: Numerics) -> jax.Array:
    """A product of rounded values with f32 accumulation.

    The operands are widened first: a matrix unit at default precision takes the same bf16 values
    back out of them, and a processor without a fast bf16 product runs its f32 one.
    """
    wide = (a.astype(jnp.float32), b.astype(jnp.float32))
    return jnp.einsum(formula, *wide, precision=numerics.precision)


def _scores(q: jax.Array, k: jax.Array, numerics: Numerics) -> jax.Array:
    """``q [S,T,G,H/G,D] · k [S,G,L,D] / sqrt(D)`` -> f32 [S,G,H/G,T,L]."""
    dots = _exact_einsum("stghd,sgld->sghtl", q, k, numerics)
    return dots * q.shape[-1] ** -0.5


def _weighted(p: jax.Array, v: jax.Array, numerics: Numerics) -> jax.Array:
    """``p [S,G,H/G,T,L] · v [S,G,L,D]`` -> f32 [S,G,H/G,T,D]."""
    return _exact_einsum("sghtl,sgld->sghtd", p, v, numerics)


def _heads_last(out: jax.Array, numerics: Numerics) -> jax.Array:
    """[S,G,H/G,T,D] -> rounded [S,T,H,D]."""
    s, g, h, t, d = out.shape
    return numerics.round(jnp.moveaxis(out, 3, 1).reshape(s, t, g * h, d))


def plain_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, numerics: Numerics
) -> jax.Array:
    """Softmax attention in one piece: the readable truth.

    Args:
        q: [S, T, H, D]. k, v: [S, G, L, D], slot l holds the token at position l.
        positions: i32 [S, T]; a query sees the slots up to its own position.

    Returns:
        [S, T, H, D] in the activation dtype.
    """
    s, t, h, d = q.shape
    g = k.shape[1]
    scores = _scores(q.reshape(s, t, g, h // g, d), k, numerics)
    visible = jnp.arange(k.shape[2]) <= positions[:, None, None, :, None]
    p = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return _heads_last(_weighted(p, v.astype(jnp.float32), numerics), numerics)


def blocked_attention(
    q: jax.Array, fetch: FetchKeys, positions: jax.Array, numerics: Numerics, block: int = KEY_BLOCK
) -> jax.Array:
    """The same by online softmax over blocks of keys, up to the last visible one.

    Probabilities are rounded to the activation dtype and the rounded values also make up the
    denominator. Blocks start at multiples of ``block`` from position 0, and a block in which
    a query sees nothing leaves that query's result untouched, so a row's bits do not depend on
    the longest row of the call.

    Args:
        q: [S, T, H, D].
        fetch: ``fetch(start)`` gives keys and values [S, G, block, D] of the slots from ``start``
            (traced i32, a multiple of ``block``) on. The cache stays where it is: only blocks that
            some query sees are read.
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
        scores = jnp.where(visible, _scores(grouped, keys, numerics), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        p = numerics.round(jnp.where(visible, jnp.exp(scores - new_top), 0.0))
        keep = jnp.exp(top - new_top)
        total = total * keep + jnp.sum(p.astype(jnp.float32), axis=-1, keepdims=True)
        return new_top, total, out * keep + _weighted(p, values, numerics)

    shape = (s, g, h // g, t)
    # Block 0 holds position 0, which every query sees, so the maximum is finite from then on.
    start = (
        jnp.full((*shape, 1), -jnp.inf, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros((*shape, d), jnp.float32),
    )
    blocks = jnp.max(positions) // block + 1
    _, total, out = lax.fori_loop(0, blocks, step, start)
    return _heads_last(out / total, numerics)
