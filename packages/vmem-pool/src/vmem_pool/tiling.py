"""How a TPU core tiles arrays in VMEM, and what that costs in bytes.

Only the last two dimensions are tiled. A full tile is 32 bytes deep and 128 lanes wide for every
dtype: (8, 128) for 32 bits, (16, 128) for 16, (32, 128) for 8, (64, 128) for 4. So a full tile
always has 4 KiB, and the byte rows of a pool that is ``uint8 [rows, 128]`` come in groups of 32.
"""

from __future__ import annotations

from math import prod
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from vmem_pool.errors import PlanError

__all__ = [
    "LANES",
    "TILE_BYTES",
    "TILE_BYTE_ROWS",
    "Shape",
    "bits_of",
    "layout_tile",
    "native_tile",
    "padded_bytes",
    "padded_shape",
]

Shape: TypeAlias = tuple[int, ...]

LANES = 128
TILE_BYTE_ROWS = 32
"""Rows of a ``uint8 [rows, 128]`` pool under one full tile of any dtype."""
TILE_BYTES = TILE_BYTE_ROWS * LANES


def bits_of(dtype: DTypeLike) -> int:
    """Bits of one element as a core holds it, e.g. 4 for ``int4``.

    Raises:
        PlanError: a type that is neither an integer nor a float, or of more than 32 bits.
    """
    kind = np.dtype(dtype)
    if jnp.issubdtype(kind, jnp.floating):
        bits = int(jnp.finfo(kind).bits)
    elif jnp.issubdtype(kind, jnp.integer):
        bits = int(jnp.iinfo(kind).bits)
    else:
        raise PlanError(f"dtype {kind} is neither an integer nor a float; store it as uint8")
    if bits > 32:
        raise PlanError(f"dtype {kind} has {bits} bits; VMEM holds at most 32 per element")
    return bits


def native_tile(dtype: DTypeLike) -> tuple[int, int]:
    """Rows and lanes of the full tile."""
    return 8 * 32 // bits_of(dtype), LANES


def layout_tile(dtype: DTypeLike, rows: int) -> tuple[int, int]:
    """The tile that the compiler gives an allocation of its own with this many rows.

    A multiple of the full tile's rows gets full tiles; fewer rows get the smallest power of two
    that holds them, at least as many as share a 32-bit word and at most 8. A view inside a pool
    always has full tiles, so the same array may be laid out differently in the two places.
    """
    full, packed = native_tile(dtype)[0], 32 // bits_of(dtype)
    if rows % full == 0:
        return full, LANES
    wanted = max(min(rows, 8), packed)
    return 1 << (wanted - 1).bit_length(), LANES


def allocated_bytes(shape: Shape, dtype: DTypeLike) -> int:
    """Bytes of an allocation of its own, in the tiles that the compiler gives it.

    Raises:
        PlanError: fewer than two dimensions, or a dtype that VMEM does not hold.
    """
    if len(shape) < 2:
        raise PlanError(f"an allocation has at least two dimensions, not shape {tuple(shape)}")
    tile = layout_tile(dtype, shape[-2])
    padded = [-(-size // unit) * unit for size, unit in zip(shape[-2:], tile)]
    return prod([*shape[:-2], *padded]) * bits_of(dtype) // 8


def padded_shape(shape: Shape, dtype: DTypeLike) -> Shape:
    """The shape in whole full tiles, e.g. (3, 8, 200) bf16 becomes (3, 16, 256).

    Raises:
        PlanError: fewer than two dimensions, or a size below 1.
    """
    if len(shape) < 2:
        raise PlanError(f"shape {shape} needs rows and lanes; write a vector as (1, size)")
    if min(shape) < 1:
        raise PlanError(f"shape {shape} has a size below 1")
    rows, lanes = native_tile(dtype)
    return (*shape[:-2], -(-shape[-2] // rows) * rows, -(-shape[-1] // lanes) * lanes)


def padded_bytes(shape: Shape, dtype: DTypeLike) -> int:
    """Bytes of the array in whole full tiles, a multiple of 4096."""
    return prod(padded_shape(shape, dtype)) * bits_of(dtype) // 8
