"""Partial results of a softmax over shares of the positions, and their exact merge.

With ``m`` the largest score of a share, ``l = Σ exp(s - m)`` and ``o = Σ exp(s - m) c``, shares
join as ``M = max m``, ``l = Σ exp(m - M) l``, ``o = Σ exp(m - M) o``; the result is ``o / l``.

Source: "Online normalizer calculation for softmax" (Milakov, Gimelshein 2018), section 3.1. Letters
as in ``reference``.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kda_mla_kernels.mla.reference import UpProjection
from kda_mla_kernels.numerics import Numerics

__all__ = ["NOTHING_SEEN", "Partial", "finish", "merge"]

NOTHING_SEEN = float(jnp.finfo(jnp.float32).min)
"""Largest score of a share in which a query sees nothing. Finite, so that differences are numbers;
beside any score that was seen its weight is 0."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Partial:
    """What queries found in some of the positions, all f32."""

    top: jax.Array
    """[S, T, H] largest score"""
    total: jax.Array
    """[S, T, H] sum of ``exp(score - top)``"""
    latent: jax.Array
    """[S, T, H, C] sum of ``exp(score - top) · latent``"""


def merge(parts: Partial) -> Partial:
    """Joins shares, stacked along a leading axis, into what their union gives."""
    top = jnp.max(parts.top, axis=0)
    weight = jnp.exp(parts.top - top)
    latent = jnp.sum(parts.latent * weight[..., None], axis=0)
    return Partial(top, jnp.sum(parts.total * weight, axis=0), latent)


def finish(part: Partial, up: UpProjection, numerics: Numerics) -> jax.Array:
    """Divides, rounds and makes values of the mixed latents: [S, T, H, V], activation dtype."""
    mixed = numerics.round(part.latent / part.total[..., None])
    return numerics.round(numerics.einsum("sthc,hvc->sthv", mixed, up.values))
