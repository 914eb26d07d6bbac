"""What the model's layers do to a batch of tokens, for the compiled programs."""

from __future__ import annotations

from dataclasses import dataclass
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
from megakernel_kimi.xla.forward import Run, run_layers
from megakernel_kimi.xla.rank import Rank

__all__ = ["Programs"]


@dataclass(frozen=True)
class Programs(backend.Programs):
    """All programs of one model on one mesh."""

    rank: Rank

    def cache_shapes(self) -> Caches:
        """See the base class."""
        return cache_shapes(self.rank.layout, self.rows, self.slots, self.rank.held)

    @property
    def chunk_rule(self) -> ChunkRule:
        """See the base class."""
        return kda.chunked_delta_rule

    def passed(
        self, weights: KimiWeights, caches: Any, batch: Batch, memory: Memory, records: Any
    ) -> Passed:
        """See the base class. Features are the prefix that enters each feature layer."""
        hidden = embed(weights.embedding, batch.flat(batch.tokens), self.rank.numerics)
        run = Run(self.rank, batch, memory, self.feature_layers)
        stream = run_layers(run, weights.segments, hidden, (caches, records))
        blocks = self.rank.layout.config.num_blocks
        mixed = stream.residual.read(self.rank, weights.output_mix, blocks)
        return Passed(mixed, stream.features, *stream.carry)

    def head(self, weights: KimiWeights, hidden: jax.Array) -> jax.Array:
        """See the base class."""
        config, numerics = self.rank.layout.config, self.rank.numerics
        normed = norm.stepwise_rms_norm(hidden, weights.final_norm, config.rms_norm_eps, numerics)
        return gather_logits(numerics.dot_rows(normed, weights.head), config.vocab_size)

    def no_records(self, batch: Batch) -> DeltaRecords:
        """See the base class."""
        taps = self.rank.layout.config.conv_kernel_size
        return no_records(self.cache_shapes(), taps, batch, per_channel=True)
