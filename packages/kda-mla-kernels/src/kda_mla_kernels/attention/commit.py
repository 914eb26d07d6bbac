"""Writes the accepted tokens of a block into the cache, in place.

A token's column lies across a group of 128 lanes, and its row in a tile of rows; both are read,
changed and written back. All layers and sequences form one list of items; item n has the buffers
``n mod DEPTH``. When item n is taken up, the loads of the next DEPTH - 2 items are in flight; its
stores are waited for one item later, just before item n + DEPTH is loaded into the same buffers. So
a commit costs its bytes, not a read's and a write's latency for each layer and sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.attention.cache import Cache, CacheShape
from kda_mla_kernels.attention.fresh import Fresh, FreshTokens
from kda_mla_kernels.attention.split import Run, Split, whole_run
from kda_mla_kernels.attention.tiles import groups_of
from kda_mla_kernels.block import Block, Where

__all__ = ["CacheCommit", "CommitScratch", "CommitSource", "Group"]

DEPTH = 4
"""Items with buffers at a time: one that is changed, one that is stored, two that are loaded."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CommitScratch:
    """VMEM and semaphores of a commit."""

    columns: Any
    """held [DEPTH, groups, (G,) column dim, lanes]"""
    rows: Any
    """held [DEPTH, groups, (G,) rows, row dim]"""
    loads: Any
    """DMA semaphores [DEPTH, groups of both]"""
    stores: Any
    """the same"""
    records: Any
    """held [2, P, record width]: this layer's and the next one's"""
    fetched: Any
    """DMA semaphores [2]"""
    fresh: Fresh


class CommitSource(NamedTuple):
    """What a commit works on, inside the kernel."""

    cache: Cache
    """HBM references, which a call aliases with its inputs"""
    where: Where
    accepted: Any
    """i32 [S], an SMEM reference; 0 to T"""


class Group(NamedTuple):
    """An aligned run of slots of an item."""

    touched: jax.Array
    """whether a token is written into it"""
    run: Run
    """the tokens, their slots counted from the group's start"""
    cache: Any
    vmem: Any
    sems: tuple[Any, Any]
    """of the load and of the store"""

    def load(self) -> Any:
        """The copy from the cache."""
        return pltpu.make_async_copy(self.cache, self.vmem, self.sems[0])

    def store(self) -> Any:
        """The copy back into it."""
        return pltpu.make_async_copy(self.vmem, self.cache, self.sems[1])

    def start_load(self) -> None:
        """Starts the load, if there is one."""
        pl.when(self.touched)(lambda: self.load().start())

    def wait_store(self) -> None:
        """Waits for the store, if there is one."""
        pl.when(self.touched)(lambda: self.store().wait())


@dataclass(frozen=True)
class CacheCommit:
    """Read-modify-write of the groups of slots that accepted tokens fall into.

    Sequences that accept anything must have distinct rows. Of a sequence that accepts nothing,
    nothing is read or written; tokens at or beyond slot L are dropped.

    Attributes:
        columns_first: whether a record has the columns before the rows.
        split: how positions are dealt out to ranks; None where the cache holds all.
    """

    cache: CacheShape
    block: Block
    columns_first: bool
    split: Split | None = None

    def __post_init__(self) -> None:
        self.fresh  # noqa: B018 (checks the block)

    @property
    def fresh(self) -> FreshTokens:
        """The records' tokens."""
        return FreshTokens(self.cache, self.block)

    def scratch(self) -> CommitScratch:
        """Shapes of the scratch."""
        cache = self.cache
        columns, rows = groups_of(self.block.tokens, cache.slots)
        sems = pltpu.SemaphoreType.DMA((DEPTH, columns.count + rows.count))

        def groups(count: int, *size: int) -> Any:
            return pltpu.VMEM((DEPTH, count, *cache.heads, *size), cache.held)

        return CommitScratch(
            columns=groups(columns.count, cache.column_dim, columns.size),
            rows=groups(rows.count, rows.size, cache.row_dim),
            loads=sems,
            stores=sems,
            records=pltpu.VMEM((2, self.block.padded, cache.record_width), cache.held),
            fetched=pltpu.SemaphoreType.DMA((2,)),
            fresh=self.fresh.scratch(),
        )

    def __call__(self, scratch: CommitScratch, source: CommitSource, records: Any) -> None:
        """Writes the first ``accepted[s]`` tokens of each sequence at ``positions[s]`` and on.

        Args:
            records: HBM reference [N, P, record width] in the held dtype.
        """
        layers, sequences = source.cache.rows.shape[0], self.block.sequences
        items = layers * sequences
        self._fetch(scratch, records, 0).start()
        for item in range(min(DEPTH - 1, items)):
            self._load(scratch, source, jnp.int32(item))

        def step(item: jax.Array, carry: int) -> int:
            layer, s = lax.div(item, sequences), lax.rem(item, sequences)

            @pl.when(s == 0)
            def _() -> None:
                self._take_record(scratch, records, layer, layers)

            self._change(scratch, source, item)
            pl.when(item > 0)(lambda: self._finish(scratch, source, item - 1))
            ahead = item + DEPTH - 1
            pl.when(ahead < items)(lambda: self._load(scratch, source, ahead))
            return carry

        lax.fori_loop(0, items, step, 0)
        self._finish(scratch, source, jnp.int32(items - 1))

    def _load(self, scratch: CommitScratch, source: CommitSource, item: jax.Array) -> None:
        for group in chain(*self._groups(scratch, source, item)):
            group.start_load()

    def _finish(self, scratch: CommitScratch, source: CommitSource, item: jax.Array) -> None:
        for group in chain(*self._groups(scratch, source, item)):
            group.wait_store()

    def _change(self, scratch: CommitScratch, source: CommitSource, item: jax.Array) -> None:
        s = lax.rem(item, self.block.sequences)
        patches = self.fresh.patch_columns, self.fresh.patch_rows
        for patch, groups in zip(patches, self._groups(scratch, source, item)):
            for group in groups:

                def change(patch: Any = patch, group: Group = group) -> None:
                    group.load().wait()
                    patch(group.vmem, scratch.fresh, s, group.run)
                    group.store().start()

                pl.when(group.touched)(change)

    def _fetch(self, scratch: CommitScratch, records: Any, layer: Any) -> Any:
        buffer = lax.rem(layer, 2)
        return pltpu.make_async_copy(
            records.at[layer], scratch.records.at[buffer], scratch.fetched.at[buffer]
        )

    def _take_record(
        self, scratch: CommitScratch, records: Any, layer: jax.Array, layers: int
    ) -> None:
        pl.when(layer + 1 < layers)(lambda: self._fetch(scratch, records, layer + 1).start())
        self._fetch(scratch, records, layer).wait()
        record = scratch.records[lax.rem(layer, 2)].astype(jnp.float32)
        cache = self.cache
        width = cache.column_width if self.columns_first else cache.row_width
        parts = record[:, :width], record[:, width:]
        self.fresh.fill(scratch.fresh, *(parts if self.columns_first else parts[::-1]))

    def _run(self, source: CommitSource, s: jax.Array) -> Run:
        position, accepted = source.where.positions[s], source.accepted[s]
        if self.split is None:
            return whole_run(position, accepted)
        run = self.split.run(position, self.block.tokens)
        return run._replace(end=jnp.minimum(run.end, accepted))

    def _groups(
        self, scratch: CommitScratch, source: CommitSource, item: jax.Array
    ) -> tuple[list[Group], list[Group]]:
        """Groups of columns and of rows of an item, as many as there can be."""
        layer, s = (f(item, self.block.sequences) for f in (lax.div, lax.rem))
        row, buffer, run = source.where.rows[s], lax.rem(item, DEPTH), self._run(source, s)
        end = jnp.minimum(run.slot + run.end, self.cache.slots)
        columns, rows = groups_of(self.block.tokens, self.cache.slots)

        def group(number: int, size: int, in_columns: bool) -> Group:
            start = run.first - lax.rem(run.first, size) + number * size
            slots = pl.ds(pl.multiple_of(start, size), size)
            cache = (source.cache.columns if in_columns else source.cache.rows).at[layer, row]
            vmem = scratch.columns if in_columns else scratch.rows
            sem = number if in_columns else columns.count + number
            return Group(
                touched=(start < end) & (run.first < end),
                run=run._replace(slot=run.slot - start),
                cache=cache.at[..., slots] if in_columns else cache.at[..., slots, :],
                vmem=vmem.at[buffer, number],
                sems=(scratch.loads.at[buffer, sem], scratch.stores.at[buffer, sem]),
            )

        return (
            [group(number, columns.size, True) for number in range(columns.count)],
            [group(number, rows.size, False) for number in range(rows.count)],
        )
