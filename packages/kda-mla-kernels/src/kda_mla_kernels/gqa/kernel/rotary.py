"""Rotary embedding of heads inside a kernel; same rounding as ``gqa.rotary``.

Lanes cannot be split in the middle of a register, so the halves are swapped by rotating lanes, and
angles, sines and selections span whole lanes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.block import Block
from kda_mla_kernels.gqa.kernel.shape import GqaShape
from kda_mla_kernels.numerics import Numerics

__all__ = ["row_positions", "turn", "wide_angles"]


def row_positions(block: Block, positions: Any) -> jax.Array:
    """Position of each row's token: i32 [P, 1]; rows of no token stand at 0.

    Args:
        positions: i32 [S], an SMEM reference.
    """
    row = jax.lax.broadcasted_iota(jnp.int32, (block.padded, 1), 0)
    found = jnp.zeros_like(row)
    for s in range(block.sequences):
        token = row - s * block.tokens
        mine = (token >= 0) & (token < block.tokens)
        found = jnp.where(mine, positions[s] + token, found)
    return found


def wide_angles(
    shape: GqaShape, positions: jax.Array, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """Rounded cosines and signed sines for every lane of a head.

    Args:
        positions: i32 [P, 1].

    Returns:
        two f32 [P, D]: cosines, and sines negated in the first half of the rotated dims; those of
        lanes beyond them mean nothing.
    """
    half = shape.rotary_dim // 2
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, shape.head_dim), 1)
    frequency = jnp.zeros((1, shape.head_dim), jnp.float32)
    for j in range(half):
        # Scalars, because a kernel takes no constant arrays; powers are f64, as in the reference.
        value = shape.theta ** (-2 * j / shape.rotary_dim)
        frequency = jnp.where((lane == j) | (lane == j + half), value, frequency)
    angle = positions.astype(jnp.float32) * frequency
    cos, sin = (numerics.round(f(angle)).astype(jnp.float32) for f in (jnp.cos, jnp.sin))
    return cos, jnp.where(lane < half, -sin, sin)


def turn(
    x: jax.Array, angles: tuple[jax.Array, jax.Array], rotary_dim: int, numerics: Numerics
) -> jax.Array:
    """Rotates dims (j, j + n) for j < n = rotary_dim / 2; the other dims pass through.

    ``round(round(x · cos) + round(swapped x · signed sin))``: products and sums are rounded one by
    one.

    Args:
        x: f32 [..., D] holding rounded values. angles: two f32 that broadcast to it.

    Returns:
        f32 [..., D] holding rounded values.
    """
    cos, signed_sin = angles
    half, dim, axis = rotary_dim // 2, x.shape[-1], x.ndim - 1
    lane = jax.lax.broadcasted_iota(jnp.int32, (1,) * axis + (dim,), axis)
    ahead, behind = pltpu.roll(x, dim - half, axis), pltpu.roll(x, half, axis)
    swapped = jnp.where(lane < half, ahead, behind)

    def rounded(value: jax.Array) -> jax.Array:
        return numerics.round(value).astype(jnp.float32)

    turned = rounded(rounded(x * cos) + rounded(swapped * signed_sin))
    return jnp.where(lane < rotary_dim, turned, x)
