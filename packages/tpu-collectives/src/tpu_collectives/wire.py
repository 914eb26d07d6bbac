"""How a block lies in a buffer that travels.

Blocks lie there as they are, except for a single bf16 row: a bf16 tile has at least two rows, so
such a row would travel with as many bytes of padding. Its two halves share 32-bit words instead::

    columns of the row     0 .. n/2-1     low halves of the words
                           n/2 .. n-1     high halves
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["LANES", "Wire", "lane_unit"]

LANES = 128
"""Columns of a vector register; windows of a remote copy are whole multiples of it."""
_HIGH = 0xFFFF0000
_TILE_ROWS = 8


def lane_unit(rows: int, dtype: Any) -> int:
    """Columns to which padding pays: two lane groups for a bf16 row, so that it can be packed."""
    return 2 * LANES if rows == 1 and jnp.dtype(dtype) == jnp.bfloat16 else LANES


@dataclass(frozen=True)
class Wire:
    """The layout of [rows, columns] blocks of a dtype."""

    rows: int
    columns: int
    dtype: Any

    @property
    def packed(self) -> bool:
        """Two columns share a word."""
        return lane_unit(self.rows, self.dtype) > LANES and self.columns % (2 * LANES) == 0

    @property
    def stored(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a block in its buffer."""
        if self.packed:
            return jax.ShapeDtypeStruct((self.rows, self.columns // 2), jnp.uint32)
        return jax.ShapeDtypeStruct((self.rows, self.columns), self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of a message, with the rows that tiles add."""
        rows, columns = self.stored.shape
        itemsize = self.stored.dtype.itemsize
        least = 4 // itemsize  # rows of a 32-bit sublane
        tile = max(least, min(_TILE_ROWS, 1 << (rows - 1).bit_length()))
        return -(-rows // tile) * tile * columns * itemsize

    def encode(self, block: jax.Array) -> jax.Array:
        """Round [rows, at most columns] to the dtype and fill up with zeros, for the buffer."""
        missing = self.columns - block.shape[1]
        if missing:
            zeros = jnp.zeros((self.rows, missing), block.dtype)
            block = jnp.concatenate([block, zeros], axis=1) if block.shape[1] else zeros
        if not self.packed:
            return block.astype(self.dtype)
        rounded = block.astype(jnp.bfloat16).astype(jnp.float32)
        bits = lax.bitcast_convert_type(rounded, jnp.uint32)
        half = self.columns // 2
        return (bits[:, :half] >> 16) | bits[:, half:]

    def decode(self, stored: jax.Array) -> jax.Array:
        """[rows, columns] of the dtype; bf16 that was packed comes as f32 of the same value."""
        if not self.packed:
            return stored
        bits = jnp.concatenate([stored << 16, stored & jnp.uint32(_HIGH)], axis=1)
        return lax.bitcast_convert_type(bits, jnp.float32)
