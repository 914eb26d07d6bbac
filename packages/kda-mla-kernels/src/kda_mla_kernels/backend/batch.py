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
    alone: bool = field(metadata={"static": True}, default=False)
    """True: each token attends in a product of its own, M of one shape whatever S and T are, so
    that decode and verify round alike. False: the tokens of a sequence attend together."""

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

    def queries(self, x: jax.Array) -> jax.Array:
        """[M, ...] -> [S', T', ...], the shape in which tokens attend."""
        return x[:, None] if self.alone else self.grid(x)

    def answers(self, x: jax.Array) -> jax.Array:
        """The way back: [S', T', ...] -> [M, ...]."""
        return x[:, 0] if self.alone else self.flat(x)

    @property
    def owner(self) -> jax.Array:
        """i32 [M] index of each token's sequence."""
        s, t = self.shape
        return self.flat(jnp.broadcast_to(jnp.arange(s)[:, None], (s, t)))

    @property
    def state_rows(self) -> jax.Array:
        """i32 [S] row of the state that each sequence has."""
        return jnp.arange(self.shape[0]) if self.rows is None else self.rows

    @property
    def query_rows(self) -> jax.Array:
        """i32 [S'] row of the state whose keys a query sees."""
        return self.state_rows[self.owner] if self.alone else self.state_rows
