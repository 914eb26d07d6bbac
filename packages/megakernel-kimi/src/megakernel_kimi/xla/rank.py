"""What is the same for every layer of a program, and exchanges inside of a host."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax import lax
from kda_mla_kernels.backend import RANKS
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


def split_columns(x: jax.Array, widths: tuple[int, ...]) -> list[jax.Array]:
    """Cuts the last axis into parts of these widths."""
    ends = np.cumsum(widths)[:-1]
    return jax.numpy.split(x, [int(end) for end in ends], axis=-1)
