"""What is the same for every layer of a program, and exchanges within groups of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax import lax
from kda_mla_kernels import mla
from kda_mla_kernels.backend import RANKS, HeldPositions
from kda_mla_kernels.numerics import Numerics

from megakernel_kimi.layout import KimiLayout

__all__ = ["Rank"]


@dataclass(frozen=True)
class Rank:
    """Sizes of one rank and the numerics."""

    layout: KimiLayout
    numerics: Numerics
    held: np.dtype
    """dtype of matrices and caches, at least as wide as activations: see ``backend.held_dtype``"""

    def project(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """``round(x · weights)``."""
        return self.numerics.round(self.numerics.dot(x, weights))

    def gather(self, mine: jax.Array, widths: tuple[tuple[int, int], ...]) -> list[jax.Array]:
        """Columns of all lanes, without leaving the host.

        Args:
            mine: [M, columns], several parts side by side.
            widths: of each part the lane's columns and those of the whole, without padding.

        Returns:
            the whole parts [M, width].
        """
        lanes = lax.all_gather(mine, RANKS, axis=1, axis_index_groups=self.layout.hosts)
        parts, at = [], 0
        for columns, whole in widths:
            part = lanes[:, :, at : at + columns].reshape(len(mine), -1)
            parts.append(part[:, :whole])
            at += columns
        return parts

    @property
    def held_positions(self) -> HeldPositions:
        """Those of this rank, inside of a program."""
        layout = self.layout
        return HeldPositions(layout.split, lax.rem(lax.axis_index(RANKS), layout.holders))

    def gather_heads(self, queries: jax.Array) -> jax.Array:
        """[S, T, H, N] -> [S, T, heads, N] of all ranks that hold positions of the same row."""
        if self.layout.split is None:
            return queries
        groups = self.layout.holding_groups
        return lax.all_gather(queries, RANKS, axis=2, axis_index_groups=groups, tiled=True)

    def merge_positions(self, part: mla.Partial) -> mla.Partial:
        """What all heads found in this rank's positions -> what this rank's heads found in all."""
        if self.layout.split is None:
            return part
        exchange = partial(
            lax.all_to_all,
            axis_name=RANKS,
            split_axis=2,
            concat_axis=0,
            axis_index_groups=self.layout.holding_groups,
        )

        def shares(x: jax.Array) -> jax.Array:
            """[S, T, heads, ...] -> [holders, S, T, H, ...]."""
            own = self.layout.mla_heads
            return exchange(x.reshape(*x.shape[:2], -1, own, *x.shape[3:]))

        return mla.merge(jax.tree.map(shares, part))


def split_columns(x: jax.Array, widths: tuple[int, ...]) -> list[jax.Array]:
    """Cuts the last axis into parts of these widths."""
    ends = np.cumsum(widths)[:-1]
    return jax.numpy.split(x, [int(end) for end in ends], axis=-1)
