"""Sizes and operands of an attention stage.

Letters: S sequences, T tokens each, P padded rows, Nf attention layers, R rows of the state,
H query heads, G key/value heads, D head dim, L key slots. Query head h reads key/value head
``h // (H / G)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

__all__ = ["GqaMemory", "GqaShape", "GqaVectors"]


@dataclass(frozen=True)
class GqaShape:
    """Heads of one rank.

    Attributes:
        query_heads: H, a multiple of ``kv_heads``.
        kv_heads: G.
        head_dim: D.
        rotary_dim: leading dims of a head that turn with the position; even.
        theta: base of the rotary frequencies.

    Raises:
        ValueError: heads that do not divide, or a rotary part that does not fit a head.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    theta: float

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.query_heads < 1 or self.query_heads % self.kv_heads:
            raise ValueError(
                f"{self.query_heads} query heads cannot share {self.kv_heads} key/value heads;"
                " the first must be a multiple of the second"
            )
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim {self.rotary_dim} must be even and between 2 and the head_dim"
                f" {self.head_dim}"
            )

    @property
    def group(self) -> int:
        """H / G, query heads that share a key/value head."""
        return self.query_heads // self.kv_heads

    @property
    def query_width(self) -> int:
        """H·D."""
        return self.query_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """G·D."""
        return self.kv_heads * self.head_dim

    @property
    def projected_width(self) -> int:
        """Columns of the input projection: queries, gates, keys, values, each head-major."""
        return 2 * (self.query_width + self.key_width)

    @property
    def record_width(self) -> int:
        """Columns of a record: keys, then values, both head-major."""
        return 2 * self.key_width


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GqaVectors:
    """Small weights of all attention layers: arrays outside a kernel, VMEM references inside."""

    q_gain: Any
    """f32 [Nf, 1, D] gain of the norm of each query head; a zero-centred norm passes 1 + weight"""
    k_gain: Any
    """f32 [Nf, 1, D] gain of the norm of each key head"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GqaMemory:
    """The cache: arrays outside a kernel, HBM references inside.

    Values must be finite everywhere, also in slots that hold no token: those have weight zero, and
    zero times NaN is NaN.
    """

    keys: Any
    """[Nf, R, G, D, L] normed and rotated keys as columns, the form in which a matrix unit takes
    them without turning them around"""
    values: Any
    """[Nf, R, G, L, D]"""
