"""What the delta rule reads, and tokens that do not count.

Letters: H heads, K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

__all__ = ["DeltaInputs", "mask_tokens"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaInputs:
    """What the delta rule reads, all f32. The axes before the heads are the tokens."""

    q: jax.Array
    """[..., H, K] unit length, then scaled by K^-0.5"""
    k: jax.Array
    """[..., H, K] unit length"""
    v: jax.Array
    """[..., H, V]"""
    log_decay: jax.Array
    """[..., H], or [..., H, K] per key channel, g <= 0; the state is multiplied by exp(g)"""
    beta: jax.Array
    """[..., H] in (0, 1)"""


def mask_tokens(inputs: DeltaInputs, live: jax.Array) -> DeltaInputs:
    """Makes tokens neutral that are not ``live`` [...]: they neither decay nor change a state."""
    heads, channels = live[..., None], live[..., None, None]
    per_channel = inputs.log_decay.ndim == inputs.k.ndim
    return DeltaInputs(
        q=inputs.q,
        k=jnp.where(channels, inputs.k, 0.0),
        v=jnp.where(channels, inputs.v, 0.0),
        log_decay=jnp.where(channels if per_channel else heads, inputs.log_decay, 0.0),
        beta=jnp.where(heads, inputs.beta, 0.0),
    )
