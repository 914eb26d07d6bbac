"""Kimi delta attention of one layer in a decode kernel: reads the state, returns records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kda_mla_kernels.block import Where
from kda_mla_kernels.delta.kernel.rule import split_heads
from kda_mla_kernels.delta.kernel.stage import DeltaScratch, DeltaStage, TokenInputs
from kda_mla_kernels.kda.inputs import bounded_log_decay
from kda_mla_kernels.kda.kernel.shape import KdaMemory, KdaShape, KdaVectors
from kda_mla_kernels.norm import sigmoid_gated_rms_norm

__all__ = ["KdaProjected", "KimiDeltaAttention"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KdaProjected:
    """Projections of a layer's input, rounded to the activation dtype: values or references.

    Rows that hold no token must be finite.
    """

    channels: Any
    """[P, C] queries, keys and values before the convolution"""
    rate: Any
    """[P, H·K] of the decay"""
    write: Any
    """[P, H] of beta"""
    gate: Any
    """[P, H·V] of the output"""


@dataclass(frozen=True)
class KimiDeltaAttention(DeltaStage):
    """The stage: short convolution, gates, delta rule and gated norm of one rank's heads.

    Attributes:
        lower_bound: of the log decay, below 0.

    Raises:
        ValueError: also a lower bound that is not below 0.
    """

    shape: KdaShape
    lower_bound: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lower_bound < 0:
            raise ValueError(
                f"the lower bound of log decays must be below 0, not {self.lower_bound}"
            )

    def __call__(
        self,
        scratch: DeltaScratch,
        memory: KdaMemory,
        vectors: KdaVectors,
        projected: KdaProjected,
        where: Where,
        layer: Any,
        records: Any,
    ) -> jax.Array:
        """The heads' outputs of one layer, after its input projections.

        Args:
            memory: read only.
            layer: i32, index among layers of this kind.
            records: HBM f32 [Nl, P, record width]; this layer's part is written.

        Returns:
            [P, H·V] in the activation dtype; padding rows are zero.
        """
        with jax.named_scope("kda_inputs"):
            self._receive(scratch, memory, where, layer, records)
            self._prepare(scratch, self._inputs(vectors, projected, layer))
        with jax.named_scope("kda_delta_rule"):
            self._run_sequences(scratch, memory, where, layer)
            self._send_record(scratch, records, layer).start()
        with jax.named_scope("kda_norm"):
            return self._normed(scratch, vectors.norm[layer], projected.gate)

    def _inputs(self, vectors: KdaVectors, projected: KdaProjected, layer: Any) -> TokenInputs:
        """Gates stay f32, as in ``kda.gates``."""
        log_decay = bounded_log_decay(
            projected.rate[...], vectors.slope[layer], vectors.dt_bias[layer], self.lower_bound
        )
        return TokenInputs(
            channels=projected.channels[...].astype(jnp.float32),
            taps=vectors.taps[layer],
            decay=jnp.exp(log_decay),
            beta=jax.nn.sigmoid(projected.write[...].astype(jnp.float32)),
        )

    def _normed(self, scratch: DeltaScratch, weight: jax.Array, gate: Any) -> jax.Array:
        """The gated norm of each head of each row."""
        z = split_heads(gate[...], self.shape.value_heads)
        parts = [
            sigmoid_gated_rms_norm(out, own, weight, self.eps, self.numerics)
            for out, own in zip(self._heads(scratch), z, strict=True)
        ]
        return jnp.concatenate(parts, axis=1)
