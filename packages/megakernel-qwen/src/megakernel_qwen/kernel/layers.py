"""Prefill's view of the kernel's weights: a layer is taken out of the stream when its turn comes.

A chunk of tokens is worth a program of its own, but not a second copy of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from vmem_pool.stream import unpack_matrix

from megakernel_qwen.kernel.plan import KernelModel
from megakernel_qwen.kernel.weights import KernelWeights
from megakernel_qwen.weights import GdnWeights, GqaWeights, LayerWeights, MlpWeights

__all__ = ["StreamedLayers", "head_matrix"]


@dataclass(frozen=True)
class StreamedLayers:
    """Layers of one rank for :func:`~megakernel_qwen.xla.forward.for_each_layer`."""

    model: KernelModel
    weights: KernelWeights

    @property
    def period(self) -> int:
        return self.model.layout.config.period

    @property
    def stacked(self) -> None:
        """Nothing: a layer is found by its number."""
        return None

    def member(self, turn: Any, part: None, index: int) -> LayerWeights:
        config, weights = self.model.layout.config, self.weights
        kinds = config.layer_types[: self.period]
        layer = turn * self.period + index
        slot = turn * kinds.count(kinds[index]) + kinds[:index].count(kinds[index])
        return LayerWeights(
            mixer_gain=weights.mixer_gain[layer, 0],
            mixer=self._gdn(layer, slot)
            if kinds[index] == "linear_attention"
            else self._gqa(layer, slot),
            mlp_gain=weights.mlp_gain[layer, 0],
            mlp=MlpWeights(
                self._matrix("mlp", layer, "gate_up"), self._matrix("mlp", layer, "down")
            ),
        )

    def _gdn(self, layer: Any, slot: Any) -> GdnWeights:
        vectors, heads = self.weights.gdn, self.model.layout.value_heads
        gates = self.weights.gates[slot, : 2 * heads].T
        return GdnWeights(
            in_proj=jnp.concatenate(
                [self._matrix("linear_attention", layer, "in_proj"), gates], axis=1
            ),
            taps=vectors.taps[slot],
            a_log=vectors.a_log[slot, 0],
            dt_bias=vectors.dt_bias[slot, 0],
            norm=vectors.norm[slot, 0],
            out_proj=self._matrix("linear_attention", layer, "out_proj"),
        )

    def _gqa(self, layer: Any, slot: Any) -> GqaWeights:
        vectors = self.weights.gqa
        return GqaWeights(
            in_proj=self._matrix("full_attention", layer, "in_proj"),
            q_gain=vectors.q_gain[slot, 0],
            k_gain=vectors.k_gain[slot, 0],
            out_proj=self._matrix("full_attention", layer, "out_proj"),
        )

    def _matrix(self, segment: str, layer: Any, name: str) -> jax.Array:
        """A matrix of a layer's mixer or feed-forward layer."""
        plan = self.model.stream
        number = 2 * layer + (segment == "mlp")
        pos = jnp.array(plan.starts, jnp.int32)[number]
        return unpack_matrix(plan, self.weights.image, segment, pos, name)


def head_matrix(model: KernelModel, weights: KernelWeights) -> jax.Array:
    """[D, columns of the rank's head]."""
    plan = model.stream
    return unpack_matrix(plan, weights.image, "head", plan.starts[-1], "head")
