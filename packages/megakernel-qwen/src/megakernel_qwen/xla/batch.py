"""Which tokens a program works on: S sequences of T tokens, laid flat over M rows.

Everything that acts on one token alone (norms, products, the head) sees M rows, M fixed by the
program's user, so that a token's bits do not depend on how many are really there. Only the mixers
see sequences. Rows behind S·T are zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

__all__ = ["Batch"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Tokens of one call."""

    tokens: jax.Array
    """i32 [S, T]"""
    positions: jax.Array
    """i32 [S, T]"""
    live: jax.Array
    """bool [S, T]; tokens that are not live leave no trace in the state"""
    rows: jax.Array | None
    """i32 [S] rows of the state, or None: sequence s is row s"""
    flat_rows: int = field(metadata={"static": True})
    """M >= S·T"""

    @property
    def shape(self) -> tuple[int, int]:
        s, t = self.tokens.shape
        return s, t

    def flat(self, x: jax.Array) -> jax.Array:
        """[S, T, ...] -> [M, ...]."""
        s, t = self.shape
        padding = [(0, self.flat_rows - s * t)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x.reshape(s * t, *x.shape[2:]), padding)

    def grid(self, x: jax.Array) -> jax.Array:
        """[M, ...] -> [S, T, ...]."""
        s, t = self.shape
        return x[: s * t].reshape(s, t, *x.shape[1:])
