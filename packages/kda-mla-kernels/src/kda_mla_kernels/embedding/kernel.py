"""Fetches the embedding rows of a block's tokens inside a kernel.

A rank holds consecutive rows of the table. Whole tiles are copied, since a single row of a 16-bit
table cannot be: 16 rows of width 5120 are 164 KB, which cost less than padding every row to a tile.

Letters: M rows, D hidden, N rows of the table on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.block import Block

__all__ = ["EmbeddingRows", "EmbeddingScratch", "table_rows"]

TABLE_ROWS = 16
"""Rows that are copied together; a table has a multiple of them."""
SLOTS = 2
"""Tiles in VMEM, of which a step has better use for the room."""


def table_rows(vocab_rows: int) -> int:
    """Rows of the table of a rank that has ``vocab_rows`` ids: whole groups."""
    return -(-vocab_rows // TABLE_ROWS) * TABLE_ROWS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EmbeddingScratch:
    """Scratch of :class:`EmbeddingRows`."""

    groups: Any
    """[slots, 16, D], tiles with the rows of some tokens"""
    arrived: Any
    """DMA [slots]"""


@dataclass(frozen=True)
class EmbeddingRows:
    """This rank's part of the embedding: its own tokens' rows, zero for the others.

    The sum over ranks is exact, since one term is not zero.

    Args:
        table_rows: N, a multiple of 16.
        dtype: of the table.

    Raises:
        ValueError: a table of another size.
    """

    block: Block
    table_rows: int
    width: int
    dtype: Any

    def __post_init__(self) -> None:
        if self.table_rows % TABLE_ROWS:
            raise ValueError(
                f"an embedding table has a multiple of {TABLE_ROWS} rows, not {self.table_rows}"
            )

    def scratch(self) -> EmbeddingScratch:
        """An entry of ``scratch_shapes``."""
        return EmbeddingScratch(
            groups=pltpu.VMEM((self.slots, TABLE_ROWS, self.width), self.dtype),
            arrived=pltpu.SemaphoreType.DMA((self.slots,)),
        )

    @property
    def slots(self) -> int:
        """Tokens whose tiles are on their way at a time."""
        return min(self.block.rows, SLOTS)

    def start(self, scratch: EmbeddingScratch, table: Any, tokens: Any, first: Any) -> None:
        """Starts the copies.

        Args:
            table: HBM [N, D]. tokens: SMEM i32 [M], ids of the whole vocabulary.
            first: i32, id of the table's first row.
        """
        for row in range(self.slots):
            self._copy(scratch, table, row, self._local(tokens, row, first)).start()

    def __call__(self, scratch: EmbeddingScratch, table: Any, tokens: Any, first: Any) -> jax.Array:
        """Waits for the copies of :meth:`start`: f32 [M, D]."""
        rows = []
        for row in range(self.block.rows):
            local = self._local(tokens, row, first)
            self._copy(scratch, table, row, local).wait()
            mine = (local >= 0) & (local < self.table_rows)
            at = jnp.where(mine, lax.rem(jnp.maximum(local, 0), TABLE_ROWS), -1)
            group = scratch.groups[row % self.slots].astype(jnp.float32)
            picked = lax.broadcasted_iota(jnp.int32, group.shape, 0) == at
            rows.append(jnp.sum(jnp.where(picked, group, 0.0), axis=0, keepdims=True))
            if row + self.slots < self.block.rows:
                following = self._local(tokens, row + self.slots, first)
                self._copy(scratch, table, row + self.slots, following).start()
        return jnp.concatenate(rows, axis=0)

    @staticmethod
    def _local(tokens: Any, row: int, first: Any) -> jax.Array:
        return tokens[row] - first

    def _copy(self, scratch: EmbeddingScratch, table: Any, row: int, local: jax.Array) -> Any:
        inside = jnp.clip(local, 0, self.table_rows - 1)
        start = pl.multiple_of(inside - lax.rem(inside, TABLE_ROWS), TABLE_ROWS)
        slot = row % self.slots
        return pltpu.make_async_copy(
            table.at[pl.ds(start, TABLE_ROWS)], scratch.groups.at[slot], scratch.arrived.at[slot]
        )
