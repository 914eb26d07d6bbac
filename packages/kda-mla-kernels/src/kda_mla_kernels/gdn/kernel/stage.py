"""The gated delta net of one layer in a decode kernel: reads the state, returns records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kda_mla_kernels.block import Where
from kda_mla_kernels.delta.kernel.rule import split_heads
from kda_mla_kernels.delta.kernel.stage import DeltaScratch, DeltaStage, TokenInputs
from kda_mla_kernels.gdn.inputs import gates as gates_of
from kda_mla_kernels.gdn.kernel.shape import GdnMemory, GdnShape, GdnVectors
from kda_mla_kernels.norm import gated_rms_norm

__all__ = ["DeltaNet"]


@dataclass(frozen=True)
class DeltaNet(DeltaStage):
    """The stage: short convolution, gates, delta rule and gated norm of one rank's heads."""

    shape: GdnShape

    def __call__(
        self,
        scratch: DeltaScratch,
        memory: GdnMemory,
        vectors: GdnVectors,
        projected: Any,
        gates: jax.Array,
        where: Where,
        layer: Any,
        records: Any,
    ) -> jax.Array:
        """The heads' outputs of one layer, after its input projections.

        Args:
            memory: read only.
            projected: VMEM [P, C + Hv·V] in the activation dtype: queries, keys, values, gate z.
            gates: f32 value [P, 2·Hv], rounded to the activation dtype: b, then a.
            layer: i32, index among layers of this kind.
            records: HBM f32 [Nl, P, record width]; this layer's part is written.

        Returns:
            [P, Hv·V] in the activation dtype; padding rows are zero.
        """
        with jax.named_scope("gdn_inputs"):
            self._receive(scratch, memory, where, layer, records)
            self._prepare(scratch, self._inputs(vectors, projected, gates, layer))
        with jax.named_scope("gdn_delta_rule"):
            self._run_sequences(scratch, memory, where, layer)
            self._send_record(scratch, records, layer).start()
        with jax.named_scope("gdn_norm"):
            return self._normed(scratch, vectors.norm[layer], projected)

    def _inputs(
        self, vectors: GdnVectors, projected: Any, gates: jax.Array, layer: Any
    ) -> TokenInputs:
        heads = self.shape.value_heads
        log_decay, beta = gates_of(
            gates[:, heads:],
            gates[:, :heads],
            vectors.a_log[layer],
            vectors.dt_bias[layer],
            self.numerics,
        )
        channels = projected[:, : self.shape.channels].astype(jnp.float32)
        return TokenInputs(channels, vectors.taps[layer], jnp.exp(log_decay), beta)

    def _normed(self, scratch: DeltaScratch, weight: jax.Array, projected: Any) -> jax.Array:
        """The gated norm of each head of each row."""
        z = split_heads(projected[:, self.shape.channels :], self.shape.value_heads)
        parts = [
            gated_rms_norm(out, gate, weight, self.eps, self.numerics)
            for out, gate in zip(self._heads(scratch), z, strict=True)
        ]
        return jnp.concatenate(parts, axis=1)
