"""Matrices taken out of a stream again by XLA, for programs that share a kernel's weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vmem_pool.stream.plan import StreamPlan
from vmem_pool.stream.tiles import Tile
from vmem_pool.tiling import LANES, bits_of, padded_shape

__all__ = ["unpack_matrix"]


def unpack_matrix(plan: StreamPlan, image: jax.Array, segment: str, pos: Any, name: str) -> Any:
    """The matrix [K, N] of one segment, as :func:`~vmem_pool.stream.image` packed it.

    A program that reads a layer at a time needs no second copy of the weights.

    Args:
        image: ``uint8 [slots, slot rows, 128]``.
        segment: its kind.
        pos: its first slot, an int or a traced int32.
        name: of the matrix; its elements have 8, 16 or 32 bits.

    Raises:
        PlanError: no such matrix.
        ValueError: elements of less than a byte.
    """
    tiles = plan.segments[segment].of(name)
    parts = [_tile(image, pos + tile.slot, tile) for tile in tiles]
    return jnp.concatenate(parts, axis=tiles[0].cut.value)


def _tile(image: jax.Array, slot: Any, tile: Tile) -> jax.Array:
    dtype = np.dtype(tile.matrix.dtype)
    if bits_of(dtype) < 8:
        raise ValueError(f"matrix {tile.matrix.name} of {dtype} has elements of less than a byte")
    rows, lanes = padded_shape(tile.shape, dtype)
    shape = (1, tile.bytes // LANES, LANES)
    stored = lax.dynamic_slice(image, (slot, tile.byte_row, 0), shape)
    panels = stored.reshape(lanes // LANES, rows, dtype.itemsize, LANES)
    wide = jnp.swapaxes(_joined(panels, dtype), 0, 1).reshape(rows, lanes)
    return wide[: tile.shape[0], : tile.shape[1]]


def _joined(stored: jax.Array, dtype: np.dtype) -> jax.Array:
    """u8 [panels, K, bytes, 128], lowest byte first -> [panels, K, 128]."""
    # Shifts instead of a bitcast: that would put the bytes into the lanes, which costs a relayout.
    word = jnp.dtype(f"uint{8 * dtype.itemsize}")
    value = stored[:, :, 0].astype(word)
    for byte in range(1, dtype.itemsize):
        value = value | (stored[:, :, byte].astype(word) << jnp.array(8 * byte, word))
    return lax.bitcast_convert_type(value, dtype)
