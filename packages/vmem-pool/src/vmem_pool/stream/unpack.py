"""Matrices taken out of a stream again by XLA, for programs that share a kernel's weights."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vmem_pool.stream.plan import StreamPlan
from vmem_pool.stream.tiles import Cut, Tile
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
    if bits_of(tiles[0].matrix.dtype) < 8:
        raise ValueError(
            f"matrix {name} of {tiles[0].matrix.dtype} has elements of less than a byte"
        )
    # Tiles of one shape that stand alike in successive slots are one slice of the image.
    runs = [list(run) for _, run in groupby(tiles, key=lambda tile: (tile.shape, tile.byte_row))]
    parts = [_run(image, pos, run) for run in runs]
    return jnp.concatenate(parts, axis=tiles[0].cut.value)


def _run(image: jax.Array, pos: Any, tiles: list[Tile]) -> jax.Array:
    """Tiles of one shape, one per slot."""
    first, count = tiles[0], len(tiles)
    dtype = np.dtype(first.matrix.dtype)
    (k, n), (rows, lanes) = first.shape, padded_shape(first.shape, dtype)
    shape = (count, first.bytes // LANES, LANES)
    stored = lax.dynamic_slice(image, (pos + first.slot, first.byte_row, 0), shape)
    panels = _joined(stored, dtype).reshape(count, lanes // LANES, rows, LANES)
    if first.cut is Cut.COLUMNS:
        tiles_of_rows = panels.transpose(2, 0, 1, 3).reshape(rows, count, lanes)
        return tiles_of_rows[:k, :, :n].reshape(k, count * n)
    return panels.transpose(0, 2, 1, 3).reshape(count, rows, lanes)[:, :k, :n].reshape(count * k, n)


def _joined(stored: jax.Array, dtype: np.dtype) -> jax.Array:
    """u8 [count, rows · bytes, 128], lowest byte first -> [count, rows, 128]."""
    # Shifts of strided rows instead of a bitcast, which would put the bytes into the lanes.
    word = jnp.dtype(f"uint{8 * dtype.itemsize}")
    value = stored[:, :: dtype.itemsize].astype(word)
    for byte in range(1, dtype.itemsize):
        value = value | (
            stored[:, byte :: dtype.itemsize].astype(word) << jnp.array(8 * byte, word)
        )
    return lax.bitcast_convert_type(value, dtype)
