"""The stage between the input and the output projection of an attention layer.

Source: gated attention of the Qwen3.5 modelling code; see ``gqa.reference`` for the equations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.attention.cache import Cache
from kda_mla_kernels.attention.sweep import Source, SweepScratch
from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.gqa.kernel.rotary import row_positions, turn, wide_angles
from kda_mla_kernels.gqa.kernel.shape import GqaMemory, GqaShape, GqaVectors
from kda_mla_kernels.gqa.kernel.sweep import Sweep, cache_shape
from kda_mla_kernels.gqa.reference import output_gate
from kda_mla_kernels.norm import rms_norm
from kda_mla_kernels.numerics import Numerics

__all__ = ["Attention", "AttentionScratch"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionScratch:
    """VMEM and semaphores of the stage."""

    sweep: SweepScratch
    record: Any
    """held [P, record width], on its way to HBM"""
    stored: Any
    """DMA semaphore of the record"""


@dataclass(frozen=True)
class Attention:
    """Head norms, rotary embedding, attention over a streamed cache, output gate.

    Within a kernel the layers come in order, from 0 on. For each: ``start``, then the call; after
    the last, ``drain``. T tokens in one block get the bits of T blocks of one token with commits
    in between.

    Attributes:
        shape: heads of this rank.
        block: sequences, and at most 128 tokens of each.
        numerics: policy of activations and products.
        eps: of the head norms.
        held: dtype of the cache, at least as wide as activations.
        slots: L, below 128 or a multiple of 128.
        tile: keys per load, a divisor of the slots and part of the rounding tree; see
            ``default_tile``.

    Raises:
        ValueError: slots, tile or block that do not fit together.
    """

    shape: GqaShape
    block: Block
    numerics: Numerics
    eps: float
    held: jnp.dtype
    slots: int
    tile: int

    def __post_init__(self) -> None:
        self.sweep  # noqa: B018 (checks the sizes)

    @property
    def sweep(self) -> Sweep:
        """The pass over the cache."""
        shape, cache = self.shape, cache_shape(self.shape, self.held, self.slots)
        heads = shape.query_heads, shape.head_dim
        return Sweep(cache, self.block, self.numerics, self.tile, *heads)

    def scratch(self) -> AttentionScratch:
        """Shapes of the scratch."""
        return AttentionScratch(
            sweep=self.sweep.scratch(),
            record=pltpu.VMEM((self.block.padded, self.shape.record_width), self.held),
            stored=pltpu.SemaphoreType.DMA,
        )

    def start(self, scratch: AttentionScratch, memory: GqaMemory, where: Where, layer: Any) -> None:
        """Starts the load of the first tile of sequence 0."""
        self.sweep.start(scratch.sweep, self._source(memory, where, layer))

    def __call__(
        self,
        scratch: AttentionScratch,
        memory: GqaMemory,
        vectors: GqaVectors,
        projected: Any,
        where: Where,
        layer: Any,
        records: Any,
    ) -> jax.Array:
        """Works on a layer for which ``start`` was called.

        The cache holds the positions before ``where.positions[s]``; the block's own tokens stand
        from there on, and one at or beyond slot L is not seen.

        Args:
            projected: VMEM reference [P, 2·H·D + 2·G·D] in the activation dtype: queries, gates,
                keys, values, each head-major.
            layer: i32, index among the attention layers.
            records: HBM reference [Nf, P, record width] in the held dtype; gets the normed and
                rotated keys and the values of the block's tokens.

        Returns:
            [P, H·D] in the activation dtype; rows of no token are zero.
        """
        width, shape = self.shape.query_width, self.shape
        angles = wide_angles(shape, row_positions(self.block, where.positions), self.numerics)
        # Whole rows of a head at a time, padding too: bits must not depend on their number.
        queries = jnp.split(projected[:, :width].astype(jnp.float32), shape.query_heads, axis=1)
        gain = vectors.q_gain[layer]
        turned = [self._normed_and_turned(head, gain, angles) for head in queries]
        scratch.sweep.heads[...] = jnp.stack([head[: self.block.rows] for head in turned], axis=1)

        @pl.when(layer > 0)
        def _() -> None:
            self.drain(scratch, records)

        fresh = projected[:, 2 * width :].astype(jnp.float32)
        keys, values = jnp.split(fresh, [shape.key_width], axis=1)
        heads = jnp.split(keys, shape.kv_heads, axis=1)
        gain = vectors.k_gain[layer]
        heads = [self._normed_and_turned(head, gain, angles) for head in heads]
        keys = jnp.concatenate(heads, axis=1)
        self.sweep.fresh.fill(scratch.sweep.fresh, keys, values)
        scratch.record[...] = jnp.concatenate([keys, values], axis=1).astype(self.held)
        self._record(scratch, records, layer).start()

        self.sweep(scratch.sweep, self._source(memory, where, layer))
        return self._gated(scratch.sweep.heads[...], projected[:, width : 2 * width])

    def drain(self, scratch: AttentionScratch, records: Any) -> None:
        """Waits for the record of the last layer."""
        self._record(scratch, records, 0).wait()

    def _source(self, memory: GqaMemory, where: Where, layer: Any) -> Source:
        return Source(Cache(memory.keys, memory.values), where, layer)

    def _record(self, scratch: AttentionScratch, records: Any, layer: Any) -> Any:
        return pltpu.make_async_copy(scratch.record, records.at[layer], scratch.stored)

    def _normed_and_turned(
        self, x: jax.Array, gain: jax.Array, angles: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """f32 [..., D] to rounded values in f32."""
        normed = rms_norm(x, gain, self.eps, self.numerics).astype(jnp.float32)
        return turn(normed, angles, self.shape.rotary_dim, self.numerics)

    def _gated(self, heads: jax.Array, gate: jax.Array) -> jax.Array:
        out = heads.reshape(self.block.rows, self.shape.query_width)
        out = jnp.pad(out, ((0, self.block.padded - self.block.rows), (0, 0)))
        return output_gate(self.numerics.round(out), gate, self.numerics)
