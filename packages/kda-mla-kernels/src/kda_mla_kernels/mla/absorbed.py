"""Latent attention in its absorbed form: queries move into the latent space, keys are never made.

    q_lat = keysᵀ q_own      score = (N + R)^-0.5 (q_lat · latent + q_shared · shared)
    mixed = Σ p latent       out   = values mixed

The maths of the expanded form; here q_lat and the mixed latent are rounded, there keys and values.

Source: "DeepSeek-V2" (DeepSeek-AI 2024), section 2.1.2. Letters as in ``reference``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kda_mla_kernels.mla.merge import NOTHING_SEEN, Partial, finish
from kda_mla_kernels.mla.reference import MlaShape, UpProjection
from kda_mla_kernels.numerics import Numerics

__all__ = ["absorb", "absorbed_attention", "attend", "weigh"]


def absorb(q: jax.Array, up: UpProjection, numerics: Numerics) -> jax.Array:
    """Queries as they meet cache rows: [S, T, H, N + R] -> [S, T, H, C + R], activation dtype."""
    own, shared = jnp.split(q, [up.keys.shape[1]], axis=-1)
    latent = numerics.round(numerics.einsum("sthn,hnc->sthc", own, up.keys))
    return jnp.concatenate([latent, numerics.round(shared)], axis=-1)


def weigh(
    scores: jax.Array, visible: jax.Array, top: jax.Array, latent: jax.Array, numerics: Numerics
) -> Partial:
    """A softmax relative to ``top`` [S, T, H] over cache rows.

    ``exp(score - top)`` is rounded to the activation dtype, and the rounded values also make up the
    denominator.

    Args:
        scores: f32 [S, T, H, L]. visible: bool, broadcastable to it.
        latent: [S, L, C].
    """
    p = numerics.round(jnp.where(visible, jnp.exp(scores - top[..., None]), 0.0))
    total = jnp.sum(p.astype(jnp.float32), axis=-1)
    return Partial(top, total, numerics.einsum("sthl,slc->sthc", p, latent))


def attend(
    q: jax.Array,
    rows: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    shape: MlaShape,
    numerics: Numerics,
) -> Partial:
    """Attention of absorbed queries over one share of the positions, in one piece.

    Args:
        q: [S, T, H, C + R] of :func:`absorb`. rows: [S, L, C + R], R of them shared.
        slots: i32 [L], the position that each row belongs to.
        positions: i32 [S, T]; a query sees the rows of positions up to its own.
    """
    scores = numerics.einsum("sthd,sld->sthl", q, rows) * shape.scale
    visible = slots <= positions[:, :, None, None]
    top = jnp.max(jnp.where(visible, scores, NOTHING_SEEN), axis=-1)
    return weigh(scores, visible, top, rows[..., : shape.latent], numerics)


def absorbed_attention(
    q: jax.Array, cache: jax.Array, up: UpProjection, positions: jax.Array, numerics: Numerics
) -> jax.Array:
    """The absorbed form over a whole cache; arguments and result as of the expanded form."""
    key_dim, width = up.keys.shape[1:]
    shape = MlaShape(key_dim, q.shape[-1] - key_dim, width)
    slots = jnp.arange(cache.shape[1])
    part = attend(absorb(q, up, numerics), cache, slots, positions, shape, numerics)
    return finish(part, up, numerics)
