"""Attention residual: a mixture of finished blocks and of the running prefix.

Instead of one residual stream there are the sums of finished blocks of layers and the sum inside
the current block, the prefix. What a sublayer reads is, for sources ``v_1 .. v_m``, the blocks in
order and then the prefix::

    s_j = rsqrt(mean(v_j²) + eps) · (v_j · c)      c = norm weight · projection
    mix = Σ_j softmax(s)_j v_j

The scores are those of normalised sources, the values are the raw ones.

Letters: M tokens, D hidden, B finished blocks, X mixing vectors.

Source: the Kimi K3 modelling code (attention residual); the mixture is rounded there before the
norm that follows it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.numerics import Numerics

__all__ = ["fold", "mix", "mix_scored", "scores"]


def fold(norm_weight: jax.Array, projection: jax.Array) -> jax.Array:
    """The mixing vector ``c``: f32 [D] from a norm weight [D] and a projection [D]."""
    return norm_weight.astype(jnp.float32) * projection.astype(jnp.float32)


def scores(sources: jax.Array, vectors: jax.Array, eps: float) -> jax.Array:
    """Scores of sources under one or many mixing vectors.

    A finished block never changes, so it can be scored once, when it completes, for every sublayer
    that will read it.

    Args:
        sources: [..., D]. vectors: f32 [D] or [X, D].

    Returns:
        f32 [...], or [X, ...].
    """
    wide = sources.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)
    dots = jnp.einsum("...d,xd->x...", wide, jnp.atleast_2d(vectors), precision="highest")
    scored = scale * dots
    return scored if vectors.ndim == 2 else scored[0]


def mix_scored(
    blocks: jax.Array,
    block_scores: jax.Array,
    prefix: jax.Array,
    prefix_score: jax.Array,
    numerics: Numerics,
) -> jax.Array:
    """The mixture from scores.

    Args:
        blocks: [B, M, D]. block_scores: f32 [B, M]. prefix: [M, D]. prefix_score: f32 [M].

    Returns:
        [M, D] in the activation dtype, one rounding. Without blocks it is the prefix.
    """
    if not len(blocks):
        return numerics.round(prefix)
    shares = jax.nn.softmax(jnp.concatenate([block_scores, prefix_score[None]]), axis=0)[..., None]
    total = jnp.sum(shares[:-1] * blocks.astype(jnp.float32), axis=0)
    return numerics.round(total + shares[-1] * prefix.astype(jnp.float32))


def mix(
    blocks: jax.Array, prefix: jax.Array, vector: jax.Array, eps: float, numerics: Numerics
) -> jax.Array:
    """The mixture of all sources under one mixing vector, everything computed here.

    Args:
        blocks: [B, M, D]. prefix: [M, D]. vector: f32 [D] of :func:`fold`. eps: of the norm.

    Returns:
        [M, D] in the activation dtype.
    """
    block_scores, prefix_score = scores(blocks, vector, eps), scores(prefix, vector, eps)
    return mix_scored(blocks, block_scores, prefix, prefix_score, numerics)
