"""The gated delta rule: one token, and a whole sequence as a loop over it.

Letters: T tokens, H heads, K key dim, V value dim. States are f32 [..., H, K, V].

Source: "Gated Delta Networks" (Yang, Kautz, Hatamizadeh 2024), eq. 10, and for a decay per channel
"Kimi Linear" (Kimi Team 2025), eq. 1. States, gates and products
are f32 under every numerics policy, as the models keep them: a state lives as long as the sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.delta.inputs import DeltaInputs

__all__ = ["delta_rule", "move", "sequence"]


def delta_rule(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token: the prediction uses the decayed state, the output the updated one.

    ``u = beta (v - Sᵀ(decay · k))``, ``S <- decay · S + k ⊗ u``, ``o = Sᵀq``.

    Args:
        state: [..., K, V]. q, k: [..., K]. v: [..., V]. beta: [...]. All f32.
        decay: f32 [...], or [..., K] per key channel.

    Returns:
        the new state, the output [..., V] and the update u [..., V].
    """
    predicted = _read(state, _per_channel(decay, k) * k)
    update = beta[..., None] * (v - predicted)
    state = move(state, decay, k, update)
    return state, _read(state, q), update


def _per_channel(decay: jax.Array, key: jax.Array) -> jax.Array:
    """[..., 1] or [..., K]."""
    return decay if decay.ndim == key.ndim else decay[..., None]


def _read(state: jax.Array, key: jax.Array) -> jax.Array:
    """``Sᵀ key``."""
    return jnp.einsum("...kv,...k->...v", state, key, precision=lax.Precision.HIGHEST)


def move(state: jax.Array, decay: jax.Array, key: jax.Array, update: jax.Array) -> jax.Array:
    """``diag(decay) S + key ⊗ update``; arguments as in :func:`delta_rule`."""
    return state * _per_channel(decay, key)[..., None] + key[..., :, None] * update[..., None, :]


def sequence(state: jax.Array, inputs: DeltaInputs) -> tuple[jax.Array, jax.Array]:
    """The delta rule over the T tokens of one sequence.

    Args:
        state: f32 [H, K, V] before the first token. inputs: fields [T, ...].

    Returns:
        the state after the last token and outputs f32 [T, H, V].
    """

    def token(state: jax.Array, x: DeltaInputs) -> tuple[jax.Array, jax.Array]:
        state, out, _ = delta_rule(state, x.q, x.k, x.v, jnp.exp(x.log_decay), x.beta)
        return state, out

    return lax.scan(token, state, inputs)
