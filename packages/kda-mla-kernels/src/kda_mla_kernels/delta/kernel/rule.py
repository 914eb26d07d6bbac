"""The delta rule of one token and one head on values, for the vector unit.

A sum over keys runs over sublanes and not on the matrix unit: at one token a matrix product would
load the state as weights. The state therefore stands as [K, V], and a key is needed as [K, V] with
equal columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

__all__ = [
    "HeadToken",
    "as_columns",
    "decayed_states",
    "delta_rule",
    "move",
    "split_heads",
    "spread",
]


@dataclass(frozen=True)
class HeadToken:
    """What one value head reads of one token, f32."""

    query: jax.Array
    """[K, V], equal columns"""
    key: jax.Array
    """[K, V], equal columns"""
    value: jax.Array
    """[1, V]"""
    beta: jax.Array
    """[1, V], equal columns"""


def split_heads(x: jax.Array, heads: int) -> list[jax.Array]:
    """[P, heads·D] as heads of [P, D]."""
    dim = x.shape[1] // heads
    return [x[:, h * dim : (h + 1) * dim] for h in range(heads)]


def spread(x: jax.Array, dim: int) -> jax.Array:
    """[P, H] -> [P, H·dim], each number ``dim`` times."""
    rows, heads = x.shape
    columns = [jnp.broadcast_to(x[:, h : h + 1], (rows, dim)) for h in range(heads)]
    return jnp.concatenate(columns, axis=1)


def as_columns(row: jax.Array, heads: int) -> jax.Array:
    """A token's vectors of all heads, [1, heads·K], as columns [K, heads]."""
    return jnp.concatenate(split_heads(row, heads), axis=0).T


def decayed_states(states: jax.Array, factors: list[jax.Array]) -> jax.Array:
    """``decay · S`` of several heads.

    Args:
        states: [H, K, V]. factors: of each head, broadcast to [K, V].
    """
    return jnp.stack([state * factor for state, factor in zip(states, factors, strict=True)])


def move(decayed: jax.Array, key: jax.Array, update: jax.Array) -> jax.Array:
    """``(decay · S) + key ⊗ update``.

    The decayed state comes from memory, in the stage as in the commit: in one expression, a
    compiler may fuse either product into the sum, and would leave other bits in one of the two.

    Args:
        decayed, key: [K, V]; the key has equal columns. update: [1, V].
    """
    return decayed + key * update


def delta_rule(decayed: jax.Array, x: HeadToken) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``u = beta (v - (decay · S)ᵀk)``, ``S <- decay · S + k ⊗ u``, ``o = Sᵀq``.

    Source: "Gated Delta Networks" (Yang, Kautz, Hatamizadeh 2024), eq. 10, and for a decay per
    channel "Kimi Linear" (Kimi Team 2025), eq. 1.

    Args:
        decayed: f32 [K, V], decay · S.

    Returns:
        the new state, the output [1, V] and the update u [1, V].
    """
    predicted = jnp.sum(decayed * x.key, axis=0, keepdims=True)
    update = x.beta * (x.value - predicted)
    state = move(decayed, x.key, update)
    return state, jnp.sum(state * x.query, axis=0, keepdims=True), update
