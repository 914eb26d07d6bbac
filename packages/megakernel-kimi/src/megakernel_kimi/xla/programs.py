"""What the model's layers do to a batch of tokens, for the compiled programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from kda_mla_kernels import backend, kda, norm
from kda_mla_kernels.backend import (
    Batch,
    ChunkRule,
    DeltaRecords,
    Memory,
    Passed,
    embed,
    gather_logits,
    no_records,
)

from megakernel_kimi.weights import KimiWeights
from megakernel_kimi.xla.caches import Caches, cache_shapes
from megakernel_kimi.xla.forward import HeldLayers, Layers, Run, run_layers
from megakernel_kimi.xla.rank import Rank

__all__ = ["Held", "Programs"]


@dataclass(frozen=True)
class Held:
    """One rank's weights as programs read them."""

    embedding: jax.Array
    """[N, D]"""
    layers: Layers
    output_mix: jax.Array
    """f32 [D]"""
    final_norm: jax.Array
    """f32 [D]"""
    columns: Callable[[jax.Array], jax.Array]
    """normed [M, D] -> f32 [M, N], this rank's logits"""


@dataclass(frozen=True)
class Programs(backend.Programs):
    """All programs of one model on one mesh."""

    rank: Rank

    def cache_shapes(self) -> Caches:
        """See the base class."""
        return cache_shapes(self.rank.layout, self.rows, self.slots, self.rank.held)

    def rank_slots(self, slots: int) -> int:
        """See the base class."""
        return self.rank.layout.rank_slots(slots)

    @property
    def chunk_rule(self) -> ChunkRule:
        """See the base class."""
        return kda.chunked_delta_rule

    def passed(
        self, weights: KimiWeights, caches: Any, batch: Batch, memory: Memory, records: Any
    ) -> Passed:
        """See the base class. Features are the prefix that enters each feature layer."""
        held = self._held(weights)
        hidden = embed(held.embedding, batch.flat(batch.tokens), self.rank.numerics)
        run = Run(self.rank, batch, memory, self.feature_layers)
        stream = run_layers(run, held.layers, hidden, (caches, records))
        blocks = self.rank.layout.config.num_blocks
        mixed = stream.residual.read(self.rank, held.output_mix, blocks)
        return Passed(mixed, stream.features, *stream.carry)

    def head(self, weights: KimiWeights, hidden: jax.Array) -> jax.Array:
        """See the base class."""
        config, numerics = self.rank.layout.config, self.rank.numerics
        held = self._held(weights)
        normed = norm.stepwise_rms_norm(hidden, held.final_norm, config.rms_norm_eps, numerics)
        return gather_logits(held.columns(normed), config.vocab_size)

    def _held(self, weights: Any) -> Held:
        """What a program reads, however the weights are held."""
        layers = HeldLayers.of(self.rank.layout.config, weights.segments)
        columns = partial(self.rank.numerics.dot_rows, table=weights.head)
        return Held(weights.embedding, layers, weights.output_mix, weights.final_norm, columns)

    def no_records(self, batch: Batch) -> DeltaRecords:
        """See the base class."""
        taps = self.rank.layout.config.conv_kernel_size
        return no_records(self.cache_shapes(), taps, batch, per_channel=True)
