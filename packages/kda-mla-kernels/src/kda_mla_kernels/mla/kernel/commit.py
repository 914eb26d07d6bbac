"""Writes the accepted tokens of a block into the cache of latents, in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.attention.cache import Cache
from kda_mla_kernels.attention.commit import CacheCommit, CommitScratch, CommitSource
from kda_mla_kernels.attention.split import Split
from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.commit import Accepted, check_arrays, commit_in_place
from kda_mla_kernels.mla.kernel.shape import MlaMemory, cache_shape, record_width
from kda_mla_kernels.mla.reference import MlaShape

__all__ = ["LatentCommit", "commit_latents"]


@dataclass(frozen=True)
class LatentCommit:
    """Read-modify-write of the groups of slots that accepted tokens fall into.

    Sequences that accept anything must have distinct rows. Of a sequence that accepts nothing,
    nothing is read or written; tokens at or beyond slot L, or of another rank's share, are dropped.

    Attributes:
        held: dtype of the cache and of the records.
        slots: L of this rank, below 128 or a multiple of 128.
        split: how positions are dealt out to ranks; None where this rank holds all.

    Raises:
        ValueError: slots or a block that attention does not take either.
    """

    shape: MlaShape
    block: Block
    held: jnp.dtype
    slots: int
    split: Split | None = None

    def __post_init__(self) -> None:
        self.cache  # noqa: B018 (checks the sizes)

    @property
    def cache(self) -> CacheCommit:
        """The commit of shared key dims as columns and of latents as rows."""
        shape = cache_shape(self.shape, self.held, self.slots)
        return CacheCommit(shape, self.block, columns_first=False, split=self.split)

    def scratch(self) -> CommitScratch:
        """Shapes of the scratch."""
        return self.cache.scratch()

    def __call__(
        self,
        scratch: CommitScratch,
        memory: MlaMemory,
        records: Any,
        where: Where,
        accepted: Any,
    ) -> None:
        """Writes the first ``accepted[s]`` tokens of each sequence at ``positions[s]`` and on.

        Args:
            memory: HBM references of the cache, which a call aliases with its inputs.
            records: HBM reference [Nm, P, C + D] in the held dtype.
            accepted: i32 [S], an SMEM reference; 0 to T.
        """
        cache = Cache(memory.shared, memory.latent)
        self.cache(scratch, CommitSource(cache, where, accepted), records)


def commit_latents(
    commit: LatentCommit,
    memory: MlaMemory,
    records: jax.Array,
    where: Where,
    accepted: jax.Array,
    interpret: Any = False,
) -> MlaMemory:
    """One kernel that commits all layers; donate ``memory`` and it is changed in place.

    Args:
        commit: sizes of the attention stage.
        memory: arrays; slots other than those of accepted tokens keep their bits.
        records: held [Nm, P, C + D], as the stage wrote them.
        where: arrays i32 [S], those of ``Split.where`` if positions are split; rows of sequences
            that accept something must differ.
        accepted: i32 [S], 0 to T.
        interpret: as in ``pallas_call``.

    Returns:
        the memory after the accepted tokens.

    Raises:
        ValueError: memory or records of other shapes or types.
    """
    _check(commit, memory, records)

    return commit_in_place(
        f"mla_commit_s{commit.block.sequences}_t{commit.block.tokens}",
        commit,
        commit.scratch(),
        memory,
        Accepted(where, accepted, records),
        # Checking a transfer costs four times as much as starting it; the interpreter checks.
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret,
    )


def _check(commit: LatentCommit, memory: MlaMemory, records: jax.Array) -> None:
    layers, rows = memory.latent.shape[:2]
    latent, shared, held = commit.shape.latent, commit.shape.shared_dim, commit.held
    width = record_width(commit.shape)
    expected: dict[str, tuple[jax.Array, tuple[int, ...], Any]] = {
        "latent": (memory.latent, (layers, rows, commit.slots, latent), held),
        "shared": (memory.shared, (layers, rows, shared, commit.slots), held),
        "records": (records, (layers, commit.block.padded, width), held),
    }
    check_arrays(expected)
