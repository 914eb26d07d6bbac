"""How the slots of a cache are cut: tiles that are loaded, groups that are written."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from kda_mla_kernels.gqa.kernel.shape import GqaShape

__all__ = ["LANES", "Groups", "default_tile", "groups_of"]

LANES = 128
ROWS = 16
"""Rows of a bf16 tile, and two tiles of f32: where a dynamic row offset may point."""
LONGEST_TILE = 2048
"""Keys: at one key/value head of 256 the load of this many takes longer than the work on them."""
TILE_BYTES = 8 << 20
"""VMEM of two tiles of keys and two of values."""


def default_tile(shape: GqaShape, held: DTypeLike, slots: int) -> int:
    """Keys per tile: the most that divide the slots, up to 2,048 and 8 MiB of VMEM.

    The tile is part of the rounding tree: results of different tiles may differ in the last bit.

    Args:
        slots: L, below 128 or a multiple of 128.
    """
    if slots < LANES:
        return slots
    key_bytes = 2 * 2 * shape.key_width * jnp.dtype(held).itemsize
    most = min(LONGEST_TILE, TILE_BYTES // key_bytes)
    tiles = [tile for tile in range(LANES, most + 1, LANES) if slots % tile == 0]
    return max(tiles, default=LANES)


@dataclass(frozen=True)
class Groups:
    """Aligned runs of slots that a read-modify-write of T consecutive slots touches.

    Attributes:
        size: slots of a group.
        count: groups that T consecutive slots touch at most.
    """

    size: int
    count: int


def groups_of(tokens: int, slots: int) -> tuple[Groups, Groups]:
    """Groups of keys, which lie along lanes, and of values, which lie along rows.

    Raises:
        ValueError: slots that are neither fewer than 128 nor a multiple of 128.
    """
    if slots < 1 or (slots > LANES and slots % LANES):
        raise ValueError(f"a cache of {slots} slots; it must have a multiple of 128, or fewer")

    def groups(size: int) -> Groups:
        return Groups(size, min(slots // size, (tokens + size - 2) // size + 1))

    return groups(min(LANES, slots)), groups(ROWS if slots % ROWS == 0 else slots)
