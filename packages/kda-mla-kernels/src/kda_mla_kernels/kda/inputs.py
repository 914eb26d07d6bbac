"""From projections to what the delta rule reads: bounded gates and unit vectors.

Letters: H heads, K key dim.

Source: "Kimi Linear" (Kimi Team 2025), section 3, with the lower-bound gate and the rounding points
of the Kimi K3 modelling code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kda_mla_kernels.norm import l2_norm

__all__ = ["bounded_log_decay", "gates", "unit_heads"]


def bounded_log_decay(
    rate: jax.Array, slope: jax.Array, dt_bias: jax.Array, lower_bound: float
) -> jax.Array:
    """``g = lower_bound · sigmoid(slope · (rate + dt_bias))`` in f32, without rounding.

    A channel keeps between ``exp(lower_bound)`` and 1 of its state.

    Args:
        rate, slope, dt_bias: of shapes that broadcast. lower_bound: below 0.
    """
    step = rate.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    return lower_bound * jax.nn.sigmoid(slope * step)


def gates(
    rate: jax.Array, write: jax.Array, a_log: jax.Array, dt_bias: jax.Array, lower_bound: float
) -> tuple[jax.Array, jax.Array]:
    """:func:`bounded_log_decay` with slope ``exp(A_log)``, and ``beta = sigmoid(write)``, in f32.

    Args:
        rate: [..., H, K] and write: [..., H], projections of the token.
        a_log: [H]. dt_bias: [H, K].
        lower_bound: below 0.

    Returns:
        log decay f32 [..., H, K] and beta f32 [..., H].
    """
    slope = jnp.exp(a_log.astype(jnp.float32))[:, None]
    beta = jax.nn.sigmoid(write.astype(jnp.float32))
    return bounded_log_decay(rate, slope, dt_bias, lower_bound), beta


def unit_heads(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Convolved queries and keys [..., H, K] as f32 unit vectors; the query carries K^-0.5."""
    return l2_norm(q) * q.shape[-1] ** -0.5, l2_norm(k)
