"""What a block's own tokens leave, put where the cache will have it.

Patched into a copy of a cache group, it makes it what it will be after the commit; so attention
over the patched copy rounds exactly as attention over the committed cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.attention.cache import CacheShape
from kda_mla_kernels.attention.split import Run
from kda_mla_kernels.attention.tiles import LANES
from kda_mla_kernels.block import SUBLANES, Block

__all__ = ["Fresh", "FreshTokens"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fresh:
    """VMEM that holds what a block's tokens leave: a row for each, up to the period."""

    columns: Any
    """f32 [S, period, column width], held values"""
    rows: Any
    """f32 [S, period, row width], the same"""


@dataclass(frozen=True)
class FreshTokens:
    """Keeps what a block's tokens leave, and patches it into groups of slots.

    A group takes the rows over and over, rotated so that the right one is at each slot, and keeps
    those of its slots that have a token. So there is one rotation for all tokens, and of whole
    rows, before they become columns.

    Raises:
        ValueError: more than 128 tokens of a sequence.
    """

    cache: CacheShape
    block: Block

    def __post_init__(self) -> None:
        if self.block.tokens > LANES:
            raise ValueError(
                f"a block of {self.block.tokens} tokens a sequence; attention takes at most {LANES}"
            )

    @property
    def _period(self) -> int:
        """Rows until they repeat: a power of two, so that a group of 128 has whole periods."""
        return max(SUBLANES, 1 << (self.block.tokens - 1).bit_length())

    def scratch(self) -> Fresh:
        """Shapes of the scratch."""

        def rows(width: int) -> Any:
            return pltpu.VMEM((self.block.sequences, self._period, width), jnp.float32)

        return Fresh(rows(self.cache.column_width), rows(self.cache.row_width))

    def fill(self, fresh: Fresh, columns: jax.Array, rows: jax.Array) -> None:
        """Takes what the block's tokens leave, f32 [P, column width] and [P, row width]."""
        tokens = self.block.tokens
        for s in range(self.block.sequences):
            run = slice(s * tokens, (s + 1) * tokens)
            fresh.columns[s, :tokens, :] = columns[run]
            fresh.rows[s, :tokens, :] = rows[run]

    def patch_columns(self, group: Any, fresh: Fresh, s: Any, run: Run) -> None:
        """Puts tokens of sequence s into a group of slots that lie along lanes.

        Args:
            group: VMEM reference [(G,) column dim, up to 128 slots].
            run: slots counted from the group's start.
        """
        size = group.shape[-1]
        columns = self._repeated(fresh.columns[s], run.slot, LANES).T[:, :size]
        # As words of two 16-bit dims, there are half as many to choose from.
        new, old = (
            pltpu.bitcast(x, jnp.int32)
            for x in (columns.astype(group.dtype), group[...].reshape(-1, size))
        )
        chosen = jnp.where(_mine(new.shape, 1, run), new, old)
        group[...] = pltpu.bitcast(chosen, group.dtype).reshape(group.shape)

    def patch_rows(self, group: Any, fresh: Fresh, s: Any, run: Run) -> None:
        """Puts tokens of sequence s into a group of slots that lie along rows.

        Args:
            group: VMEM reference [(G,) slots of the group, row dim].
            run: slots counted from the group's start.
        """
        size, dim = group.shape[-2:]
        rows = self._repeated(fresh.rows[s], run.slot, size)
        heads = [rows[:, g * dim : (g + 1) * dim] for g in range(self.cache.head_count)]
        new = jnp.stack(heads) if self.cache.heads else rows
        chosen = jnp.where(_mine(new.shape, new.ndim - 2, run), new, group[...].astype(jnp.float32))
        group[...] = chosen.astype(group.dtype)

    def _repeated(self, rows: jax.Array, first: Any, size: int) -> jax.Array:
        """[size, width] with token 0 at row ``first``, modulo the period."""
        # Two's complement makes the mask a remainder for negative shifts too.
        rolled = pltpu.roll(rows, first & (self._period - 1), 0)
        return jnp.concatenate([rolled] * -(-size // self._period))[:size]


def _mine(shape: tuple[int, ...], axis: int, run: Run) -> jax.Array:
    """Which slots along an axis are those of the run's tokens."""
    token = jax.lax.broadcasted_iota(jnp.int32, shape, axis) - run.slot
    return (token >= run.begin) & (token < run.end)
