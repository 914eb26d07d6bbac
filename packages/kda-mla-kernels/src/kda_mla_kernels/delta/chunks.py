"""Running a chunked form over tokens: padding, masking and the loop over chunks.

Letters: S sequences, T tokens of each, H heads, C tokens of a chunk, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.delta.inputs import DeltaInputs, mask_tokens

__all__ = ["ChunkForm", "mask_valid", "over_chunks"]

ChunkForm: TypeAlias = Callable[[jax.Array, DeltaInputs], tuple[jax.Array, jax.Array]]
"""State f32 [S, H, K, V] and fields [S, H, C, ...] -> the state after them, out [S, H, C, V]."""


def mask_valid(inputs: DeltaInputs, valid: jax.Array) -> DeltaInputs:
    """Makes the tokens from ``valid`` (i32 [S]) on neutral; fields [S, T, ...]."""
    live = jnp.arange(inputs.beta.shape[1])[None, :] < valid[:, None]
    return mask_tokens(inputs, live)


def over_chunks(
    form: ChunkForm, state: jax.Array, inputs: DeltaInputs, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Runs ``form`` over T tokens, chunk after chunk.

    Args:
        state: f32 [S, H, K, V] before the first token. inputs: fields [S, T, ...].
        chunk: C. The last chunk is filled with neutral tokens.

    Returns:
        the state after the last token and outputs f32 [S, T, H, V].
    """
    tokens = inputs.beta.shape[1]
    padded = -(-tokens // chunk) * chunk

    def to_chunks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, padded - tokens)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], padded // chunk, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)  # [chunks, S, H, C, ...]

    state, out = lax.scan(form, state, jax.tree.map(to_chunks, inputs))
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 2, 3)  # [S, chunks, C, H, V]
    return state, out.reshape(out.shape[0], padded, *out.shape[3:])[:, :tokens]
