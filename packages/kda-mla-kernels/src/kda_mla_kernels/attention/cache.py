"""A cache whose tokens lie as columns of one array and as rows of another.

Letters: N attention layers, R rows of the state, G key/value heads, L slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from kda_mla_kernels.attention.tiles import LANES

__all__ = ["Cache", "CacheShape"]


class Cache(NamedTuple):
    """Arrays outside a kernel, HBM references inside; the axis of heads is there if there are any.

    They must be finite everywhere, also in slots that hold no token: those have weight zero, and
    zero times NaN is NaN.
    """

    columns: Any
    """held [N, R, (G,) column dim, L]"""
    rows: Any
    """held [N, R, (G,) L, row dim]"""


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a cache.

    Attributes:
        heads: (G,), or () where all query heads share what is cached.
        column_dim: values of a head that lie along a column.
        row_dim: values of a head that lie along a row.
        held: dtype of the cache and of the records.
        slots: L, below 128 or a multiple of 128.

    Raises:
        ValueError: slots that are neither fewer than 128 nor a multiple of 128.
    """

    heads: tuple[int, ...]
    column_dim: int
    row_dim: int
    held: jnp.dtype
    slots: int

    def __post_init__(self) -> None:
        if self.slots < 1 or (self.slots > LANES and self.slots % LANES):
            raise ValueError(
                f"a cache of {self.slots} slots; it must have a multiple of {LANES}, or fewer"
            )

    @property
    def head_count(self) -> int:
        """G, or 1."""
        return self.heads[0] if self.heads else 1

    @property
    def column_width(self) -> int:
        """Values of a token that lie along a column, all heads."""
        return self.head_count * self.column_dim

    @property
    def row_width(self) -> int:
        """Values of a token that lie along a row, all heads."""
        return self.head_count * self.row_dim

    @property
    def record_width(self) -> int:
        """Values that a token leaves."""
        return self.column_width + self.row_width
