"""The delta rule token by token for many sequences at once, with records to replay it.

A replayed state must have the bits of a decoded one, and a token's bits must not depend on how
many sequences or tokens a call has:

- one token is one turn of one loop, since a compiler orders a sum by the shapes around it;
- the step that moves a state is one expression, shared by :func:`recur` and :func:`replay`, since a
  compiler fuses one of two products into a sum and must choose the same one in both;
- tokens that must not count are therefore made neutral (decay 1, update 0) instead of selecting
  between the old and the new state.

Letters: S sequences, M tokens of all, H heads, K key dim, V value dim. States are f32
[..., H, K, V].
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.delta.inputs import DeltaInputs
from kda_mla_kernels.delta.reference import delta_rule, move

__all__ = ["DeltaStep", "recur", "replay"]


class DeltaStep(NamedTuple):
    """What one token did to the state: ``S <- decay · S + key ⊗ update``."""

    decay: jax.Array
    """f32 [M, H], or [M, H, K] per key channel"""
    key: jax.Array
    """f32 [M, H, K]"""
    update: jax.Array
    """f32 [M, H, V]"""


def recur(
    states: jax.Array, inputs: DeltaInputs, owner: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, DeltaStep]:
    """The delta rule over M tokens in order, each moving the state of the sequence it belongs to.

    Args:
        states: f32 [S, H, K, V] before the first token.
        inputs: fields [M, ...].
        owner: i32 [M] index of each token's sequence; None: all belong to sequence 0.

    Returns:
        the states after the last token, outputs f32 [M, H, V] and the replay records.
    """

    def token(
        states: jax.Array, step: tuple[jax.Array, DeltaInputs]
    ) -> tuple[jax.Array, tuple[jax.Array, DeltaStep]]:
        mine, x = step
        decay = jnp.exp(x.log_decay)
        state, out, update = delta_rule(states[mine], x.q, x.k, x.v, decay, x.beta)
        return states.at[mine].set(state), (out, DeltaStep(decay, x.k, update))

    owners = jnp.zeros(inputs.beta.shape[0], jnp.int32) if owner is None else owner
    states, (out, steps) = lax.scan(token, states, (owners, inputs))
    return states, out, steps


def replay(states: jax.Array, steps: DeltaStep, owner: jax.Array, counts: jax.Array) -> jax.Array:
    """Applies recorded tokens in decode's order.

    Args:
        states: f32 [S, H, K, V] before the first token. steps: fields [M, ...].
        owner: i32 [M] as in :func:`recur`. counts: bool [M], which tokens are applied.

    Returns:
        the states that feeding these tokens one by one leaves.
    """

    def token(
        states: jax.Array, step: tuple[jax.Array, jax.Array, DeltaStep]
    ) -> tuple[jax.Array, None]:
        mine, real, (decay, key, update) = step
        decay, update = jnp.where(real, decay, 1.0), jnp.where(real, update, 0.0)
        return states.at[mine].set(move(states[mine], decay, key, update)), None

    return lax.scan(token, states, (owner, counts, steps))[0]
