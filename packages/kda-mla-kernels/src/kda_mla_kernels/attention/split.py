"""Which slots the tokens of a block have, where a cache holds all positions or a share of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.attention.tiles import LANES
from kda_mla_kernels.block import Where

__all__ = ["Run", "Split", "whole_run"]


class Run(NamedTuple):
    """Tokens of a block that stand in consecutive slots; i32 scalars or ints."""

    slot: Any
    """of token 0, or where it would be if the run began with it, which may be negative"""
    begin: Any
    """first token of the run"""
    end: Any
    """token after its last one; there is none if it is not above ``begin``"""

    @property
    def first(self) -> Any:
        """Slot of the first token."""
        return self.slot + self.begin


def whole_run(position: Any, tokens: Any) -> Run:
    """The run of a cache that holds all positions."""
    return Run(position, 0, tokens)


@dataclass(frozen=True)
class Split:
    """Positions dealt out to ranks block by block, so that shares stay equal as a context grows.

    Slot ``i · block + j`` of rank r holds position ``(i · ranks + r) · block + j``. All methods but
    :meth:`where` and :meth:`counted`, which make them, take and give positions *counted* from the
    rank's first one, ``r · block``; they may be negative.

    Attributes:
        block: consecutive positions of a rank, a multiple of 128.
        ranks: two or more.

    Raises:
        ValueError: another block, or fewer ranks.
    """

    block: int
    ranks: int

    def __post_init__(self) -> None:
        if self.block < 1 or self.block % LANES or self.ranks < 2:
            raise ValueError(
                f"positions are split in blocks of a multiple of {LANES} over at least 2 ranks,"
                f" not in blocks of {self.block} over {self.ranks}"
            )

    @property
    def stride(self) -> int:
        """Positions from one block of a rank to its next."""
        return self.block * self.ranks

    def where(self, at: Where, rank: Any) -> Where:
        """Sequences with counted positions, for a rank's kernels: arrays outside a kernel."""
        return Where(at.rows, self.counted(at.positions, rank))

    def counted(self, positions: Any, rank: Any) -> Any:
        """Positions counted from the rank's first one."""
        return positions - rank * self.block

    def position(self, slot: Any) -> Any:
        """Counted position of a slot; not for kernels, since it divides."""
        return slot // self.block * self.stride + slot % self.block

    def slot(self, position: Any) -> Any:
        """Slot of a counted position, -1 where another rank holds it; not for kernels, since it
        divides."""
        inside = position % self.stride
        held = (position >= 0) & (inside < self.block)
        return jnp.where(held, position // self.stride * self.block + inside, -1)

    def run(self, position: Any, tokens: int) -> Run:
        """The rank's tokens among those from ``position`` on; at most 128, so one run."""
        period, inside = self._halves(position)
        slot = period * self.block + inside
        # Behind the rank's block, the first token of its own is the one that opens the next block.
        missing = self.stride - inside
        later = Run((period + 1) * self.block - missing, missing, tokens)
        early = Run(position, -position, tokens)
        here = Run(slot, 0, jnp.minimum(tokens, self.block - inside))
        return _choose(position < 0, early, _choose(inside < self.block, here, later))

    def count(self, position: Any) -> jax.Array:
        """Slots of the rank that hold positions up to this one."""
        period, inside = self._halves(position)
        filled = period * self.block + jnp.minimum(inside + 1, self.block)
        return jnp.where(position < 0, 0, filled)

    def offsets(self, index: Any, tile: int) -> tuple[jax.Array, jax.Array]:
        """Positions of the slots of a tile.

        Args:
            tile: slots; a divisor or a multiple of the block.

        Returns:
            of the tile's first slot, a scalar; and of all its slots relative to it, i32 [1, tile].
        """
        first = index * tile
        block = lax.div(first, self.block)
        start = block * self.stride + (first - block * self.block)
        slot = lax.broadcasted_iota(jnp.int32, (1, tile), 1)
        gap = self.stride - self.block
        steps = [jnp.where(slot >= edge, gap, 0) for edge in range(self.block, tile, self.block)]
        return start, sum(steps, slot)

    def _halves(self, position: Any) -> tuple[Any, Any]:
        period = lax.div(position, jnp.int32(self.stride))
        return period, position - period * self.stride


def _choose(condition: Any, one: Run, other: Run) -> Run:
    return Run(*(jnp.where(condition, a, b) for a, b in zip(one, other)))
