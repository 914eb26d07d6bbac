"""Writes the accepted tokens of a block into the cache, in place.

Keys are columns of the cache, so a token lies across 128-lane groups, which are read, changed and
written back. All layers and sequences form one list of items; item n has the buffers
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
from jax.typing import DTypeLike

from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.commit import Accepted, check_arrays, commit_in_place
from kda_mla_kernels.gqa.kernel.fresh import Fresh, FreshTokens
from kda_mla_kernels.gqa.kernel.shape import GqaMemory, GqaShape
from kda_mla_kernels.gqa.kernel.tiles import groups_of

__all__ = ["CommitScratch", "KeyValueCommit", "commit_keys"]

DEPTH = 4
"""Items with buffers at a time: one that is changed, one that is stored, two that are loaded."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CommitScratch:
    """VMEM and semaphores of a commit."""

    keys: Any
    """held [DEPTH, key groups, G, D, lanes]"""
    values: Any
    """held [DEPTH, value groups, G, rows, D]"""
    loads: Any
    """DMA semaphores [DEPTH, key and value groups]"""
    stores: Any
    """the same"""
    records: Any
    """held [2, P, record width]: this layer's and the next one's"""
    fetched: Any
    """DMA semaphores [2]"""
    fresh: Fresh


class Source(NamedTuple):
    """What a commit works on, inside the kernel."""

    memory: GqaMemory
    where: Where
    accepted: Any


class Group(NamedTuple):
    """An aligned run of slots of an item."""

    touched: jax.Array
    """whether a token is written into it"""
    first: jax.Array
    """slot of token 0, counted from the group's start"""
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
class KeyValueCommit:
    """Read-modify-write of the groups of slots that accepted tokens fall into.

    Sequences that accept anything must have distinct rows. Of a sequence that accepts nothing,
    nothing is read or written; tokens at or beyond slot L are dropped.

    Attributes:
        held: dtype of the cache and of the records.
        slots: L, below 128 or a multiple of 128.

    Raises:
        ValueError: slots or a block that attention does not take either.
    """

    shape: GqaShape
    block: Block
    held: jnp.dtype
    slots: int

    def __post_init__(self) -> None:
        groups_of(self.block.tokens, self.slots)
        self.fresh  # noqa: B018 (checks the block)

    @property
    def fresh(self) -> FreshTokens:
        """The records' tokens."""
        return FreshTokens(self.shape, self.block)

    def scratch(self) -> CommitScratch:
        """Shapes of the scratch."""
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        keys, values = groups_of(self.block.tokens, self.slots)
        sems = pltpu.SemaphoreType.DMA((DEPTH, keys.count + values.count))
        return CommitScratch(
            keys=pltpu.VMEM((DEPTH, keys.count, heads, dim, keys.size), self.held),
            values=pltpu.VMEM((DEPTH, values.count, heads, values.size, dim), self.held),
            loads=sems,
            stores=sems,
            records=pltpu.VMEM((2, self.block.padded, self.shape.record_width), self.held),
            fetched=pltpu.SemaphoreType.DMA((2,)),
            fresh=self.fresh.scratch(),
        )

    def __call__(
        self, scratch: CommitScratch, memory: GqaMemory, records: Any, where: Where, accepted: Any
    ) -> None:
        """Writes the first ``accepted[s]`` tokens of each sequence at ``positions[s]`` and on.

        Args:
            memory: HBM references of the cache, which a call aliases with its inputs.
            records: HBM reference [Nf, P, record width] in the held dtype.
            accepted: i32 [S], an SMEM reference; 0 to T.
        """
        layers, sequences = memory.keys.shape[0], self.block.sequences
        items = layers * sequences
        source = Source(memory, where, accepted)
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

    def _load(self, scratch: CommitScratch, source: Source, item: jax.Array) -> None:
        for group in chain(*self._groups(scratch, source, item)):
            group.start_load()

    def _finish(self, scratch: CommitScratch, source: Source, item: jax.Array) -> None:
        for group in chain(*self._groups(scratch, source, item)):
            group.wait_store()

    def _change(self, scratch: CommitScratch, source: Source, item: jax.Array) -> None:
        s = lax.rem(item, self.block.sequences)
        patches = self.fresh.patch_keys, self.fresh.patch_values
        for patch, groups in zip(patches, self._groups(scratch, source, item)):
            for group in groups:

                def change(patch: Any = patch, group: Group = group) -> None:
                    group.load().wait()
                    patch(group.vmem, scratch.fresh, s, (group.first, source.accepted[s]))
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
        width = self.shape.key_width
        self.fresh.fill(scratch.fresh, record[:, :width], record[:, width:])

    def _groups(
        self, scratch: CommitScratch, source: Source, item: jax.Array
    ) -> tuple[list[Group], list[Group]]:
        """Groups of keys and of values of an item, as many as there can be."""
        memory, where, accepted = source
        layer, s = (f(item, self.block.sequences) for f in (lax.div, lax.rem))
        position, row, buffer = where.positions[s], where.rows[s], lax.rem(item, DEPTH)
        end = jnp.minimum(position + accepted[s], self.slots)
        keys, values = groups_of(self.block.tokens, self.slots)

        def group(number: int, size: int, is_keys: bool) -> Group:
            start = position - lax.rem(position, size) + number * size
            run = pl.ds(pl.multiple_of(start, size), size)
            cache = (memory.keys if is_keys else memory.values).at[layer, row]
            vmem = scratch.keys if is_keys else scratch.values
            sem = number if is_keys else keys.count + number
            return Group(
                touched=(start < end) & (position < end),
                first=position - start,
                cache=cache.at[:, :, run] if is_keys else cache.at[:, run, :],
                vmem=vmem.at[buffer, number],
                sems=(scratch.loads.at[buffer, sem], scratch.stores.at[buffer, sem]),
            )

        return (
            [group(number, keys.size, True) for number in range(keys.count)],
            [group(number, values.size, False) for number in range(values.count)],
        )


def commit_keys(
    shape: GqaShape,
    block: Block,
    held: DTypeLike,
    memory: GqaMemory,
    records: jax.Array,
    where: Where,
    accepted: jax.Array,
    interpret: Any = False,
) -> GqaMemory:
    """One kernel that commits all layers; donate ``memory`` and it is changed in place.

    Args:
        shape, block, held: those of the attention stage.
        memory: arrays; slots other than those of accepted tokens keep their bits.
        records: held [Nf, P, record width], as the stage wrote them.
        where: arrays i32 [S]; rows of sequences that accept something must differ.
        accepted: i32 [S], 0 to T.
        interpret: as in ``pallas_call``.

    Returns:
        the memory after the accepted tokens.

    Raises:
        ValueError: memory or records of other shapes or types.
    """
    commit = KeyValueCommit(shape, block, jnp.dtype(held), memory.values.shape[-2])
    _check(commit, memory, records)
    return commit_in_place(
        f"gqa_commit_s{block.sequences}_t{block.tokens}_g{shape.kv_heads}",
        commit,
        commit.scratch(),
        memory,
        Accepted(where, accepted, records),
        # Checking a transfer costs four times as much as starting it; the interpreter checks.
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret,
    )


def _check(commit: KeyValueCommit, memory: GqaMemory, records: jax.Array) -> None:
    layers, rows = memory.keys.shape[:2]
    heads, dim = commit.shape.kv_heads, commit.shape.head_dim
    held = commit.held
    expected: dict[str, tuple[jax.Array, tuple[int, ...], Any]] = {
        "keys": (memory.keys, (layers, rows, heads, dim, commit.slots), held),
        "values": (memory.values, (layers, rows, heads, commit.slots, dim), held),
        "records": (records, (layers, commit.block.padded, commit.shape.record_width), held),
    }
    check_arrays(expected)
