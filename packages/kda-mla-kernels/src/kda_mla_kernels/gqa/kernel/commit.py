"""Writes the accepted tokens of a block into the cache of keys and values, in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from kda_mla_kernels.attention.cache import Cache
from kda_mla_kernels.attention.commit import CacheCommit, CommitScratch, CommitSource
from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.commit import Accepted, check_arrays, commit_in_place
from kda_mla_kernels.gqa.kernel.shape import GqaMemory, GqaShape
from kda_mla_kernels.gqa.kernel.sweep import cache_shape

__all__ = ["KeyValueCommit", "commit_keys"]


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
        self.cache  # noqa: B018 (checks the sizes)

    @property
    def cache(self) -> CacheCommit:
        """The commit of keys as columns and of values as rows."""
        shape = cache_shape(self.shape, self.held, self.slots)
        return CacheCommit(shape, self.block, columns_first=True)

    def scratch(self) -> CommitScratch:
        """Shapes of the scratch."""
        return self.cache.scratch()

    def __call__(
        self, scratch: CommitScratch, memory: GqaMemory, records: Any, where: Where, accepted: Any
    ) -> None:
        """Writes the first ``accepted[s]`` tokens of each sequence at ``positions[s]`` and on.

        Args:
            memory: HBM references of the cache, which a call aliases with its inputs.
            records: HBM reference [Nf, P, record width] in the held dtype.
            accepted: i32 [S], an SMEM reference; 0 to T.
        """
        source = CommitSource(Cache(memory.keys, memory.values), where, accepted)
        self.cache(scratch, source, records)


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
