"""Which tokens a decode kernel works on, and where their sequences stand.

A call has S sequences of T tokens each: decoding is T = 1, a verify step has T > 1. Token t of
sequence s is flat row ``s·T + t``. Everything that acts on one token alone sees all rows at once,
padded with zero rows to whole sublanes; only the mixers see sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["Block", "Where", "by_sublanes", "row_sums"]

LANES = 128
SUBLANES = 8
"""Rows of a 32-bit tile. Padding to them costs nothing on a matrix unit, and leaves a product few
shapes, in which a row's bits do not depend on how many rows a call has."""


def by_sublanes(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Applies a function of rows to whole sublanes at a time.

    A processor may order the sum of a row by how many rows there are. What sums along a row goes
    through here, so that a row has the same bits in every block.

    Args:
        function: of arrays with 8 rows each.
        arrays: [P, ...], P a multiple of 8.
    """
    groups = arrays[0].shape[0] // SUBLANES
    parts = zip(*(jnp.split(array, groups) for array in arrays), strict=True)
    return jnp.concatenate([function(*part) for part in parts])


def row_sums(x: jax.Array) -> jax.Array:
    """Sum of each row, the same bits in every block: f32 [P, N] -> f32 [P, 1].

    Halves are added to each other while both have whole lanes, so that a processor need not add
    one register after the other.
    """

    def summed(rows: jax.Array) -> jax.Array:
        while rows.shape[1] % (2 * LANES) == 0:
            half = rows.shape[1] // 2
            rows = rows[:, :half] + rows[:, half:]
        return jnp.sum(rows, axis=1, keepdims=True)

    return by_sublanes(summed, x)


@dataclass(frozen=True)
class Block:
    """The static shape of a call.

    Raises:
        ValueError: no sequences or no tokens.
    """

    sequences: int
    tokens: int

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.tokens < 1:
            raise ValueError(
                f"a block has at least one sequence of one token, not {self.sequences} of"
                f" {self.tokens}"
            )

    @property
    def rows(self) -> int:
        """S·T, rows that hold a token."""
        return self.sequences * self.tokens

    @property
    def padded(self) -> int:
        """P, rows of every activation: whole sublanes."""
        return -(-self.rows // SUBLANES) * SUBLANES

    def pad(self, rows: jax.Array) -> jax.Array:
        """[M, D] -> [P, D], zero rows behind."""
        missing = self.padded - rows.shape[0]
        if not missing:
            return rows
        return jnp.concatenate([rows, jnp.zeros((missing, rows.shape[1]), rows.dtype)], axis=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Where:
    """Scalars of the sequences: arrays outside a kernel, SMEM references inside."""

    rows: Any
    """i32 [S] row of the state that each sequence has"""
    positions: Any
    """i32 [S] position of the first token of each sequence"""
