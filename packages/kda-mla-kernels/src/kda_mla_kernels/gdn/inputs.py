"""From projections to what the delta rule reads: gates and unit vectors.

Letters: S sequences, T tokens of each, M tokens of all, C convolution channels (queries, keys,
values), W taps, Hk key heads, Hv value heads, K key dim, V value dim. States are f32
[..., Hv, K, V].

Source: the Qwen3.5 modelling code (gates, head repetition, rounding points).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kda_mla_kernels.delta.inputs import DeltaInputs
from kda_mla_kernels.norm import l2_norm
from kda_mla_kernels.numerics import Numerics

__all__ = ["GdnInputs", "gates", "split_heads"]


GdnInputs = DeltaInputs
"""What the delta rule reads, with log decays [..., Hv]."""


def gates(
    a: jax.Array, b: jax.Array, a_log: jax.Array, dt_bias: jax.Array, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """``g = -exp(A_log) · softplus(a + dt_bias)`` in f32 and ``beta = round(sigmoid(b))``.

    Args:
        a, b: [..., Hv] projections of the token. a_log, dt_bias: [Hv].

    Returns:
        log decay and beta, f32 [..., Hv].
    """
    rate = jnp.exp(a_log.astype(jnp.float32))
    step = jax.nn.softplus(a.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    beta = numerics.round(jax.nn.sigmoid(b.astype(jnp.float32)))
    return -rate * step, beta.astype(jnp.float32)


def split_heads(
    channels: jax.Array, key_heads: int, key_dim: int, value_heads: int, value_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts convolved channels into queries, keys and values, and normalises the first two.

    Value head h reads key head ``h // (Hv / Hk)``. The query carries the factor K^-0.5.

    Args:
        channels: [..., C], C = queries, keys, values, each head-major.

    Returns:
        f32 q, k [..., Hv, K] and v [..., Hv, V].
    """
    width = key_heads * key_dim
    q, k, v = jnp.split(channels, [width, 2 * width], axis=-1)
    lead = channels.shape[:-1]
    repeat = value_heads // key_heads

    def unit(x: jax.Array) -> jax.Array:
        return jnp.repeat(l2_norm(x.reshape(*lead, key_heads, key_dim)), repeat, axis=-2)

    values = v.reshape(*lead, value_heads, value_dim).astype(jnp.float32)
    return unit(q) * key_dim**-0.5, unit(k), values
