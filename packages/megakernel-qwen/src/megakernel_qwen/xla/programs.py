"""What the family's layers do to a batch of tokens, for the compiled programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from kda_mla_kernels import backend, gdn, norm
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

from megakernel_qwen.xla.caches import Caches, cache_shapes
from megakernel_qwen.xla.forward import HeldLayers, Layers, run_layers
from megakernel_qwen.xla.mixers import Rank

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
        return gdn.chunked_delta_rule

    def passed(
        self, weights: Any, caches: Any, batch: Batch, memory: Memory, records: Any
    ) -> Passed:
        """See the base class. Features are the residual stream after each feature layer."""
        tokens = batch.flat(batch.tokens)
        hidden = embed(weights.embedding, tokens, self.rank.numerics)
        features = jnp.zeros((len(self.feature_layers), *hidden.shape), hidden.dtype)
        stream = Passed(hidden, features, caches, records)
        layers = self._layers(weights)
        return run_layers(self.rank, layers, stream, batch, memory, self.feature_layers)

    def _layers(self, weights: Any) -> Layers:
        return HeldLayers(weights.layers)

    def head(self, weights: Any, hidden: jax.Array) -> jax.Array:
        """See the base class."""
        eps = self.rank.layout.config.rms_norm_eps
        normed = norm.rms_norm(hidden, weights.final_gain.reshape(-1), eps, self.rank.numerics)
        return self._head_logits(weights, normed)

    def _head_logits(self, weights: Any, normed: jax.Array) -> jax.Array:
        return self._gathered(self.rank.numerics.dot_rows(normed, weights.head_table))

    def _gathered(self, logits: jax.Array) -> jax.Array:
        """Logits of the rank's vocabulary rows -> f32 [M, V] of all."""
        return gather_logits(logits, self.rank.layout.config.vocab_size)

    def no_records(self, batch: Batch) -> DeltaRecords:
        """See the base class."""
        taps = self.rank.layout.config.linear_conv_kernel_dim
        return no_records(self.cache_shapes(), taps, batch, per_channel=False)
