"""Latent attention in its expanded form: keys and values of every head are made from the latents.

A token caches one row for all heads: its normed latent (C values) and R key dims that heads share.
Position enters through the causal mask alone; nothing is rotated.

Letters: S sequences, T query tokens, L cache slots, H heads, N own key dims of a head, R shared key
dims, C latent width, V value dim.

Source: "DeepSeek-V2" (DeepSeek-AI 2024), section 2.1, without rotary embedding and with the output
gate and the rounding points of the Kimi K3 modelling code.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kda_mla_kernels.gqa.reference import output_gate
from kda_mla_kernels.numerics import Numerics

__all__ = ["MlaShape", "UpProjection", "expanded_attention", "output_gate", "split_up"]


@dataclass(frozen=True)
class MlaShape:
    """The dims that attention over a latent cache needs to know."""

    key_dim: int
    """N"""
    shared_dim: int
    """R"""
    latent: int
    """C"""

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return (self.key_dim + self.shared_dim) ** -0.5


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UpProjection:
    """What makes keys and values of a latent."""

    keys: jax.Array
    """[H, N, C]"""
    values: jax.Array
    """[H, V, C]"""


def split_up(matrix: jax.Array, heads: int, key_dim: int) -> UpProjection:
    """Cuts a stored ``kv_b`` [H (N + V), C]: per head N key rows, then V value rows."""
    rows = matrix.reshape(heads, -1, matrix.shape[-1])
    return UpProjection(rows[:, :key_dim], rows[:, key_dim:])


def expanded_attention(
    q: jax.Array, cache: jax.Array, up: UpProjection, positions: jax.Array, numerics: Numerics
) -> jax.Array:
    """Causal softmax attention over expanded keys and values, in one piece: the readable truth.

    ``softmax((N + R)^-0.5 q · [k | shared]) v`` with ``k = round(keys · latent)`` and
    ``v = round(values · latent)``; the probabilities are rounded to the activation dtype.

    Args:
        q: [S, T, H, N + R]. cache: [S, L, C + R], slot l holds the token at position l.
        positions: i32 [S, T]; a query sees the slots up to its own position.

    Returns:
        [S, T, H, V] in the activation dtype.
    """
    width = up.keys.shape[-1]
    latent, shared = cache[..., :width], cache[..., width:]
    own = numerics.round(numerics.einsum("slc,hnc->slhn", latent, up.keys))
    values = numerics.round(numerics.einsum("slc,hvc->slhv", latent, up.values))
    shared = jnp.broadcast_to(shared[:, :, None], (*own.shape[:3], shared.shape[-1]))
    keys = jnp.concatenate([own, shared.astype(own.dtype)], axis=-1)
    scores = numerics.einsum("sthd,slhd->sthl", q, keys) * q.shape[-1] ** -0.5
    visible = jnp.arange(cache.shape[1]) <= positions[:, :, None, None]
    shares = numerics.round(jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1))
    return numerics.round(numerics.einsum("sthl,slhv->sthv", shares, values))
