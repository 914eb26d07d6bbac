"""How many keys a load brings."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from kda_mla_kernels.attention.tiles import longest_tile
from kda_mla_kernels.gqa.kernel.shape import GqaShape

__all__ = ["default_tile"]

LONGEST_TILE = 2048
"""Keys: at one key/value head of 256 the load of this many takes longer than the work on them."""


def default_tile(shape: GqaShape, held: DTypeLike, slots: int) -> int:
    """Keys per tile: the most that divide the slots, up to 2,048 and 8 MiB of VMEM for two tiles.

    The tile is part of the rounding tree: results of different tiles may differ in the last bit.

    Args:
        slots: L, below 128 or a multiple of 128.
    """
    return longest_tile(slots, shape.record_width * jnp.dtype(held).itemsize, LONGEST_TILE)
