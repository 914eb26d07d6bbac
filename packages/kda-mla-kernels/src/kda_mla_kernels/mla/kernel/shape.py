"""Sizes and operands of a latent attention stage.

Letters: S sequences, T tokens each, P padded rows, Nm attention layers, R rows of the state,
H query heads, C latent width, D shared key dims, L slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kda_mla_kernels.attention.cache import CacheShape
from kda_mla_kernels.attention.tiles import longest_tile
from kda_mla_kernels.mla.reference import MlaShape

__all__ = ["LONGEST_TILE", "MlaInputs", "MlaMemory", "cache_shape", "default_tile", "record_width"]

LONGEST_TILE = 1024
"""Slots: twice as many take 10 % less time each, but short contexts pay for a whole tile."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MlaMemory:
    """The cache: arrays outside a kernel, HBM references inside.

    A token takes (C + D) values a layer, once for all heads: 1,152 bytes at 512 + 64 in bf16,
    without padding. The latent is a row, as the product with the weights takes it; the matrix unit
    turns it around for the scores. The shared key dims are a column, since rows of 64 would be
    padded to 128.

    Values must be finite everywhere, also in slots that hold no token: those have weight zero, and
    zero times NaN is NaN.
    """

    latent: Any
    """[Nm, R, L, C] normed latents"""
    shared: Any
    """[Nm, R, D, L] key dims that heads share"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MlaInputs:
    """What a layer's projections give to attention, values in f32 or the activation dtype."""

    q_latent: jax.Array
    """[P, H, C] absorbed queries, as they meet latents"""
    q_shared: jax.Array
    """[P, H, D] queries as they meet shared key dims"""
    latent: jax.Array
    """[P, C] normed latents of the block's tokens"""
    shared: jax.Array
    """[P, D] their shared key dims"""


def cache_shape(shape: MlaShape, held: jnp.dtype, slots: int) -> CacheShape:
    """Shared key dims as columns, latents as rows."""
    return CacheShape((), shape.shared_dim, shape.latent, held, slots)


def record_width(shape: MlaShape) -> int:
    """C + D, columns of a record: the latent, then the shared key dims."""
    return shape.latent + shape.shared_dim


def default_tile(shape: MlaShape, held: DTypeLike, slots: int) -> int:
    """Slots per tile: the most that divide them, up to 1,024 and 12 MiB of VMEM for three tiles.

    The tile is part of the rounding tree: results of different tiles may differ in the last bit.

    Args:
        slots: L, below 128 or a multiple of 128.
    """
    return longest_tile(slots, record_width(shape) * jnp.dtype(held).itemsize, LONGEST_TILE)
