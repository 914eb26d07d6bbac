"""The delta rule of one token and one head on values, for the vector unit.

A sum over keys runs over sublanes and not on the matrix unit: at one token a matrix product would
load the state as weights. The state therefore stands as [K, V], and a key is needed as [K, V] with
equal columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

__all__ = ["HeadToken", "as_columns", "delta_rule", "move"]


@dataclass(frozen=True)
class HeadToken:
    """What one value head reads of one token, f32."""

    query: jax.Array
    """[K, V], equal columns"""
    key: jax.Array
    """[K, V], equal columns"""
    value: jax.Array
    """[1, V]"""
    decay: jax.Array
    """[1, V], equal columns"""
    beta: jax.Array
    """[1, V], equal columns"""


def as_columns(row: jax.Array, heads: int) -> jax.Array:
    """A token's vectors of all heads, [1, heads·K], as columns [K, heads]."""
    dim = row.shape[1] // heads
    parts = [row[:, h * dim : (h + 1) * dim] for h in range(heads)]
    return jnp.concatenate(parts, axis=0).T


def move(state: jax.Array, decay: jax.Array, key: jax.Array, update: jax.Array) -> jax.Array:
    """``decay · S + key ⊗ update``: the expression of the stage and of the commit.

    Args:
        state: [K, V]. decay, update: [1, V]. key: [K, V] with equal columns.
    """
    return state * decay + key * update


def delta_rule(state: jax.Array, x: HeadToken) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``u = beta (v - (decay · S)ᵀk)``, ``S <- decay · S + k ⊗ u``, ``o = Sᵀq``.

    Source: "Gated Delta Networks" (Yang, Kautz, Hatamizadeh 2024), eq. 10.

    Args:
        state: f32 [K, V].

    Returns:
        the new state, the output [1, V] and the update u [1, V].
    """
    predicted = jnp.sum(state * x.decay * x.key, axis=0, keepdims=True)
    update = x.beta * (x.value - predicted)
    state = move(state, x.decay, x.key, update)
    return state, jnp.sum(state * x.query, axis=0, keepdims=True), update
