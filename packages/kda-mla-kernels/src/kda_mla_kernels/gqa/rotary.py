"""Rotary position embedding on the first part of each head, half-split pairing.

Source: "RoFormer" (Su et al. 2021), eq. 34, with the pairing of the Qwen3.5 modelling code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kda_mla_kernels.numerics import Numerics

__all__ = ["apply_rotary", "rotary_angles"]


def rotary_angles(
    positions: jax.Array, rotary_dim: int, theta: float, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of ``position · theta^(-2j / rotary_dim)``, rounded.

    Args:
        positions: i32 [...]. rotary_dim: even number of rotated dims.

    Returns:
        two [..., rotary_dim / 2] in the activation dtype.
    """
    # The exponent is exact in f32; the power is taken on the host in f64 by way of Python floats.
    frequency = jnp.array([theta ** (-2 * j / rotary_dim) for j in range(rotary_dim // 2)])
    angle = positions.astype(jnp.float32)[..., None] * frequency.astype(jnp.float32)
    return numerics.round(jnp.cos(angle)), numerics.round(jnp.sin(angle))


def apply_rotary(
    x: jax.Array, angles: tuple[jax.Array, jax.Array], numerics: Numerics
) -> jax.Array:
    """Rotates dims (j, j + n) for j < n = rotary_dim / 2; the other dims pass through.

    Products and sums are rounded one by one.

    Args:
        x: [..., H, D]. angles: cosines and sines [..., n] of the same leading shape.

    Returns:
        [..., H, D] in the activation dtype.
    """
    cos, sin = (part[..., None, :].astype(jnp.float32) for part in angles)
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)

    def rounded(a: jax.Array, b: jax.Array) -> jax.Array:
        return numerics.round(a.astype(jnp.float32) * b).astype(jnp.float32)

    turned_first = numerics.round(rounded(first, cos) - rounded(second, sin))
    turned_second = numerics.round(rounded(second, cos) + rounded(first, sin))
    return jnp.concatenate([turned_first, turned_second, numerics.round(rest)], axis=-1)
