"""Norms over the last axis. Sums are f32; each function says where it rounds.

Source: "Root Mean Square Layer Normalization" (Zhang, Sennrich 2019), eq. 4. The gated forms and
the rounding points are those of the Qwen3.5 (SiLU gate) and Kimi K3 (sigmoid gate, stepwise norm)
modelling code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kda_mla_kernels.numerics import Numerics

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm", "sigmoid_gated_rms_norm", "stepwise_rms_norm"]

L2_EPS = 1e-6
"""Constant of the delta-rule models, independent of the config's norm eps."""


def rms_norm(x: jax.Array, gain: jax.Array, eps: float, numerics: Numerics) -> jax.Array:
    """``round(x · rsqrt(mean(x²) + eps) · gain)``, one rounding at the end.

    A zero-centred norm passes ``1 + weight`` (in f32) as the gain.

    Args:
        x: [..., D] any float dtype. gain: f32 [D].

    Returns:
        [..., D] in the activation dtype.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return numerics.round(wide * scale * gain.astype(jnp.float32))


def stepwise_rms_norm(x: jax.Array, weight: jax.Array, eps: float, numerics: Numerics) -> jax.Array:
    """``round(round(x · rsqrt(mean(x²) + eps)) · weight)``, two roundings.

    Args:
        x: [..., D] any float dtype. weight: [D].

    Returns:
        [..., D] in the activation dtype.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    unit = numerics.round(wide * scale).astype(jnp.float32)
    return numerics.round(unit * weight.astype(jnp.float32))


def sigmoid_gated_rms_norm(
    x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float, numerics: Numerics
) -> jax.Array:
    """``round(x · rsqrt(mean(x²) + eps) · weight · sigmoid(gate))``, one rounding at the end.

    Args:
        x, gate: [..., D]. weight: [D].

    Returns:
        [..., D] in the activation dtype.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scaled = wide * scale * weight.astype(jnp.float32)
    return numerics.round(scaled * jax.nn.sigmoid(gate.astype(jnp.float32)))


def gated_rms_norm(
    x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float, numerics: Numerics
) -> jax.Array:
    """Norm with a plain weight, then a SiLU gate.

    ``u = round(x · rsqrt(mean(x²) + eps))``, ``u = round(weight · u)``,
    ``round(u · silu(gate))``: three roundings, the order of the Qwen3.5 modelling code.

    Args:
        x, gate: [..., D]. weight: [D].

    Returns:
        [..., D] in the activation dtype.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    unit = numerics.round(wide * scale)
    scaled = numerics.round(weight.astype(jnp.float32) * unit.astype(jnp.float32))
    return numerics.round(scaled.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32)))


def l2_norm(x: jax.Array) -> jax.Array:
    """``x · rsqrt(Σx² + 1e-6)`` in f32. Args: x [..., D]. Returns: f32 [..., D]."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + L2_EPS)
