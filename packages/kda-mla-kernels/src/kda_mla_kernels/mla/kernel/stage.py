"""The stage between the absorbed queries and the up projection of the values.

Source: "DeepSeek-V2" (DeepSeek-AI 2024), section 2.1.2; see ``mla.absorbed`` for the equations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.attention.cache import Cache
from kda_mla_kernels.attention.split import Split
from kda_mla_kernels.attention.sweep import Source, SweepScratch
from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.mla.kernel.partial import PARTIAL_LANES
from kda_mla_kernels.mla.kernel.shape import MlaInputs, MlaMemory, cache_shape, record_width
from kda_mla_kernels.mla.kernel.sweep import LatentSweep
from kda_mla_kernels.mla.reference import MlaShape
from kda_mla_kernels.numerics import Numerics

__all__ = ["LatentAttention", "LatentScratch"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentScratch:
    """VMEM and semaphores of the stage."""

    sweep: SweepScratch
    record: Any
    """held [P, C + D], on its way to HBM"""
    stored: Any
    """DMA semaphore of the record"""


@dataclass(frozen=True)
class LatentAttention:
    """Attention of absorbed queries over a streamed cache of latents.

    Within a kernel the layers come in order, from 0 on. For each: ``start``, then the call; after
    the last, ``drain``. T tokens in one block get the bits of T blocks of one token with commits
    in between.

    Attributes:
        heads: H, query heads of this rank; all heads, if positions are split.
        block: sequences, and at most 128 tokens of each.
        numerics: policy of activations and products.
        held: dtype of the cache, at least as wide as activations.
        slots: L of this rank, below 128 or a multiple of 128.
        tile: slots per load, a divisor of the slots and part of the rounding tree; see
            ``default_tile``.
        split: how positions are dealt out to ranks; None where this rank holds all.

    Raises:
        ValueError: slots, tile, block or split that do not fit together.
    """

    shape: MlaShape
    heads: int
    block: Block
    numerics: Numerics
    held: jnp.dtype
    slots: int
    tile: int
    split: Split | None = None

    def __post_init__(self) -> None:
        self.sweep  # noqa: B018 (checks the sizes)

    @property
    def sweep(self) -> LatentSweep:
        """The pass over the cache."""
        cache = cache_shape(self.shape, self.held, self.slots)
        width = max(record_width(self.shape), self.result_width)
        sizes = self.tile, self.heads, width, self.split, True, self.shape.scale
        return LatentSweep(cache, self.block, self.numerics, *sizes)

    @property
    def result_width(self) -> int:
        """Values of a head's result: C, and 128 more if it is one share's."""
        return self.shape.latent + (PARTIAL_LANES if self.split else 0)

    def scratch(self) -> LatentScratch:
        """Shapes of the scratch."""
        return LatentScratch(
            sweep=self.sweep.scratch(),
            record=pltpu.VMEM((self.block.padded, record_width(self.shape)), self.held),
            stored=pltpu.SemaphoreType.DMA,
        )

    def start(self, scratch: LatentScratch, memory: MlaMemory, where: Where, layer: Any) -> None:
        """Starts the load of the first tile of sequence 0."""
        self.sweep.start(scratch.sweep, self._source(memory, where, layer))

    def __call__(
        self,
        scratch: LatentScratch,
        memory: MlaMemory,
        inputs: MlaInputs,
        where: Where,
        layer: Any,
        records: Any,
    ) -> jax.Array:
        """Works on a layer for which ``start`` was called.

        The cache holds the positions before ``where.positions[s]``; the block's own tokens stand
        from there on, and one at or beyond slot L is not seen. If positions are split, ``where`` is
        that of ``Split.where``, and the tokens of other ranks are not seen either.

        Args:
            layer: i32, index among the latent attention layers.
            records: HBM reference [Nm, P, C + D] in the held dtype; gets the latents and the
                shared key dims of the block's tokens.

        Returns:
            mixed latents [P, H, C] in the activation dtype, which the values' up projection
            expands; of a share, f32 [P, H, C + 128] for ``merge_packed``. Rows of no token are
            zero.
        """
        rows, width = self.block.rows, self.shape.latent
        parts = inputs.q_latent, inputs.q_shared, inputs.latent, inputs.shared
        # Values that are held wider are rounded all the same.
        rounded = [self.numerics.round(x).astype(jnp.float32) for x in parts]
        q_latent, q_shared, latent, shared = rounded
        heads = scratch.sweep.heads
        heads[:, :, :width] = q_latent[:rows]
        heads[:, :, width : record_width(self.shape)] = q_shared[:rows]

        @pl.when(layer > 0)
        def _() -> None:
            self.drain(scratch, records)

        self.sweep.fresh.fill(scratch.sweep.fresh, shared, latent)
        scratch.record[...] = jnp.concatenate([latent, shared], axis=1).astype(self.held)
        self._record(scratch, records, layer).start()

        self.sweep(scratch.sweep, self._source(memory, where, layer))
        out = heads[:, :, : self.result_width]
        out = jnp.pad(out, ((0, self.block.padded - rows), (0, 0), (0, 0)))
        return out if self.split else self.numerics.round(out)

    def drain(self, scratch: LatentScratch, records: Any) -> None:
        """Waits for the record of the last layer."""
        self._record(scratch, records, 0).wait()

    def _source(self, memory: MlaMemory, where: Where, layer: Any) -> Source:
        return Source(Cache(memory.shared, memory.latent), where, layer)

    def _record(self, scratch: LatentScratch, records: Any, layer: Any) -> Any:
        return pltpu.make_async_copy(scratch.record, records.at[layer], scratch.stored)
