"""Causal attention of a few query tokens over keys and values, with an output gate.

Letters: S sequences, T query tokens, H query heads, G key/value heads, D head dim, L key slots.
Query head h reads key/value head ``h // (H / G)``.

Source: "Attention Is All You Need" (Vaswani et al. 2017), eq. 1, with grouped keys and values; the
gate of the Qwen3.5 modelling code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kda_mla_kernels.numerics import Numerics

__all__ = ["heads_last", "output_gate", "plain_attention", "scores", "weighted"]


def scores(q: jax.Array, k: jax.Array, numerics: Numerics) -> jax.Array:
    """``q [S,T,G,H/G,D] · k [S,G,D,L] / sqrt(D)`` -> f32 [S,G,H/G,T,L]."""
    return numerics.einsum("stghd,sgdl->sghtl", q, k) * q.shape[-1] ** -0.5


def weighted(p: jax.Array, v: jax.Array, numerics: Numerics) -> jax.Array:
    """``p [S,G,H/G,T,L] · v [S,G,L,D]`` -> f32 [S,G,H/G,T,D]."""
    return numerics.einsum("sghtl,sgld->sghtd", p, v)


def heads_last(out: jax.Array, numerics: Numerics) -> jax.Array:
    """[S,G,H/G,T,D] -> rounded [S,T,H,D]."""
    s, g, h, t, d = out.shape
    return numerics.round(jnp.moveaxis(out, 3, 1).reshape(s, t, g * h, d))


def plain_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, numerics: Numerics
) -> jax.Array:
    """Softmax attention in one piece: the readable truth.

    Probabilities ``exp(score - max)`` are rounded to the activation dtype, and the rounded values
    also make up the denominator.

    Args:
        q: [S, T, H, D]. k, v: [S, G, L, D], slot l holds the token at position l.
        positions: i32 [S, T]; a query sees the slots up to its own position.

    Returns:
        [S, T, H, D] in the activation dtype.
    """
    s, t, h, d = q.shape
    g = k.shape[1]
    visible = jnp.arange(k.shape[2]) <= positions[:, None, None, :, None]
    columns = jnp.swapaxes(k, 2, 3)
    seen = jnp.where(visible, scores(q.reshape(s, t, g, h // g, d), columns, numerics), -jnp.inf)
    p = numerics.round(jnp.exp(seen - jnp.max(seen, axis=-1, keepdims=True)))
    total = jnp.sum(p.astype(jnp.float32), axis=-1, keepdims=True)
    return heads_last(weighted(p, v, numerics) / total, numerics)


def output_gate(out: jax.Array, gate: jax.Array, numerics: Numerics) -> jax.Array:
    """``round(out · round(sigmoid(gate)))``.

    Args:
        out, gate: [..., H, D] in the activation dtype.

    Returns:
        [..., H, D] in the activation dtype.
    """
    opened = numerics.round(jax.nn.sigmoid(gate.astype(jnp.float32)))
    return numerics.round(out.astype(jnp.float32) * opened.astype(jnp.float32))
