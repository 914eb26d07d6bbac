"""From projections to what the delta rule reads: bounded gates and unit vectors.

Letters: H heads, K key dim.

Source: "Kimi Linear" (Kimi Team 2025), section 3, with the lower-bound gate and the rounding points
of the Kimi K3 modelling code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kda_mla_kernels.norm import l2_norm

__all__ = ["gates", "unit_heads"]


def gates(
    rate: jax.Array, write: jax.Array, a_log: jax.Array, dt_bias: jax.Array, lower_bound: float
) -> tuple[jax.Array, jax.Array]:
    """``g = lower_bound · sigmoid(exp(A_log) · (rate + dt_bias))``, ``beta = sigmoid(write)``.

    All in f32 and without rounding, so a channel keeps between ``exp(lower_bound)`` and 1.

    Args:
        rate: [..., H, K] and write: [..., H], projections of the token.
        a_log: [H]. dt_bias: [H, K].
        lower_bound: below 0.

    Returns:
        log decay f32 [..., H, K] and beta f32 [..., H].
    """
    slope = jnp.exp(a_log.astype(jnp.float32))[:, None]
    step = rate.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    beta = jax.nn.sigmoid(write.astype(jnp.float32))
    return lower_bound * jax.nn.sigmoid(slope * step), beta


def unit_heads(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Convolved queries and keys [..., H, K] as f32 unit vectors; the query carries K^-0.5."""
    return l2_norm(q) * q.shape[-1] ** -0.5, l2_norm(k)
