"""Products with quantised weights, without ever scaling a weight.

The scale of a group of inputs multiplies the group's partial product instead. One pass of the
matrix unit over a tile serves all its groups: the left operand has a row for each group, which is
zero outside of that group (block diagonal), so each row of the product belongs to one group.

Letters as in :mod:`~kda_mla_kernels.moe.kernel.packing`; S input rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.moe.kernel.packing import LANES, PackedMatrix
from kda_mla_kernels.numerics import Numerics

__all__ = ["block_diagonal", "decode_scales", "scaled_products"]


def block_diagonal(matrix: PackedMatrix, x: jax.Array) -> jax.Array:
    """The left operand of one tile for one input row.

    Args:
        x: [1, d], the row's inputs of this tile.

    Returns:
        [B, d], row g holds the inputs of group g.
    """
    shape = (matrix.block, matrix.depth)
    place = lax.broadcasted_iota(jnp.int32, shape, 1)
    start = lax.broadcasted_iota(jnp.int32, shape, 0) * matrix.group
    mine = (place >= start) & (place < start + matrix.group)
    # Selected in 32 bits: the mask has their tiles.
    wide = jnp.broadcast_to(x.astype(jnp.float32), shape)
    return jnp.where(mine, wide, 0.0).astype(x.dtype)


def decode_scales(scales: jax.Array) -> jax.Array:
    """E8M0 bytes to f32 powers of two. Byte 0, which no group of weights has, becomes 0."""
    return lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)


def scaled_products(
    matrix: PackedMatrix,
    lefts: list[jax.Array],
    codes: Any,
    scales: jax.Array,
    numerics: Numerics,
) -> jax.Array:
    """Scaled products of every group, summed over the tiles.

    Args:
        lefts: for each tile [S·B, d] in the activation dtype, from :func:`block_diagonal`.
        codes: u8 reference [*code_shape].
        scales: f32 [scale_rows, 128], decoded.

    Returns:
        f32 [S, B, N']; the sum over B is the product.
    """
    total = None
    for tile, left in enumerate(lefts):
        product = _dot(left, _weights(matrix, codes, tile), numerics)
        product = product.reshape(-1, matrix.block, matrix.width)
        scaled = product * _scales_of(matrix, scales, tile)[None]
        total = scaled if total is None else total + scaled
    assert total is not None
    return total


def _weights(matrix: PackedMatrix, codes: Any, tile: int) -> jax.Array:
    """The tile's codes as numbers, [d, N'] in e4m3, which holds every one of them."""
    rows = matrix.depth * matrix.code_bits // 8
    packed = codes[tile * rows : (tile + 1) * rows, :]
    if matrix.code_bits == 8:
        return pltpu.bitcast(packed, jnp.float8_e4m3fn)
    return pltpu.bitcast(packed, jnp.float4_e2m1fn).astype(jnp.float8_e4m3fn)


def _scales_of(matrix: PackedMatrix, scales: jax.Array, tile: int) -> jax.Array:
    """f32 [B, N']"""
    stride, first = matrix.tiles * matrix.block, tile * matrix.block
    panels = range(matrix.width // LANES)
    rows = [scales[p * stride + first : p * stride + first + matrix.block] for p in panels]
    return jnp.concatenate(rows, axis=1)


def _dot(left: jax.Array, weights: jax.Array, numerics: Numerics) -> jax.Array:
    if left.dtype == jnp.float32:
        weights = weights.astype(jnp.float32)
    return lax.dot_general(
        left,
        weights,
        (((1,), (0,)), ((), ())),
        precision=numerics.precision,
        preferred_element_type=jnp.float32,
    )
