"""Matrices taken out of a stream again, for XLA programs that share a kernel's weights.

On TPUs a small kernel does it, whose operand stays as it is: for its own operations XLA would turn
the bytes of the whole image around first, a second copy of all weights.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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

    def unpacked(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        axis = tiles[0].cut.value
        return lambda image, pos: jnp.concatenate([run(image, pos, part) for part in runs], axis)

    return lax.platform_dependent(
        image, jnp.int32(pos), tpu=unpacked(_run_by_kernel), default=unpacked(_run)
    )


def _run_by_kernel(image: jax.Array, pos: jax.Array, tiles: list[Tile]) -> jax.Array:
    """As :func:`_run`: one slot and one tile of the matrix at a time."""
    first, count = tiles[0], len(tiles)
    (k, n), dtype = first.shape, jnp.dtype(first.matrix.dtype)
    by_columns = first.cut is Cut.COLUMNS

    def kernel(_: Any, slot: Any, out: Any) -> None:
        stored = slot[0, pl.ds(first.byte_row, first.bytes // LANES), :]
        typed = stored if dtype == jnp.uint8 else pltpu.bitcast(stored, dtype)
        panels = padded_shape(first.shape, dtype)[1] // LANES
        out[...] = jnp.concatenate(jnp.split(typed, panels), axis=1)[:k, :n]

    return pl.pallas_call(
        kernel,
        name=f"unpack_{first.matrix.name}",
        out_shape=jax.ShapeDtypeStruct((k, count * n) if by_columns else (count * k, n), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count,),
            in_specs=[
                pl.BlockSpec((1, *image.shape[1:]), lambda i, at: (at[0] + first.slot + i, 0, 0))
            ],
            out_specs=pl.BlockSpec((k, n), lambda i, at: (0, i) if by_columns else (i, 0)),
        ),
    )(pos[None], image)


def _run(image: jax.Array, pos: Any, tiles: list[Tile]) -> jax.Array:
    """Tiles of one shape, one per slot, next to each other."""
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
