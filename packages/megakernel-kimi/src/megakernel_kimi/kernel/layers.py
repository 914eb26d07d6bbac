"""Prefill's view of the kernel's weights: a layer is taken out of the stream when its turn comes.

A chunk of tokens is worth a program of its own, but not a second copy of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from kda_mla_kernels.moe.kernel import ImagedExperts
from vmem_pool.stream import unpack_matrix

from megakernel_kimi.kernel.plan import KernelModel
from megakernel_kimi.kernel.stream import key_up, value_up
from megakernel_kimi.kernel.weights import MIX, NORM, KernelWeights, bias_columns
from megakernel_kimi.segments import Segment
from megakernel_kimi.weights import KdaWeights, LayerWeights, MlaWeights, MlpWeights, MoeWeights

__all__ = ["StreamedLayers", "head_matrix"]


@dataclass(frozen=True)
class StreamedLayers:
    """Layers of one rank (implements :class:`~megakernel_kimi.xla.forward.Layers`)."""

    model: KernelModel
    weights: KernelWeights

    def stacked(self, segment: Segment) -> None:
        """Nothing: a layer is found by its number."""
        return None

    def member(self, segment: Segment, turn: Any, part: None, index: int) -> LayerWeights:
        """See the protocol."""
        config, form = self.model.layout.config, segment.forms[index]
        layer = segment.first + turn * segment.period + index
        vectors = self.weights.hidden
        kinds = [member.attention for member in segment.forms]
        first = config.attention_index(segment.first + index)
        slot = first + turn * kinds.count(form.attention)
        return LayerWeights(
            attention_mix=vectors[2 * layer, MIX],
            attention_norm=vectors[2 * layer, NORM],
            attention=self._kda(layer, slot) if form.attention == "kda" else self._mla(layer, slot),
            ffn_mix=vectors[2 * layer + 1, MIX],
            ffn_norm=vectors[2 * layer + 1, NORM],
            ffn=self._gated("dense", layer)
            if form.dense
            else self._experts(layer, layer - len(config.dense_layers)),
        )

    def _kda(self, layer: Any, slot: Any) -> KdaWeights:
        layout, vectors = self.model.layout, self.weights.kda
        heads, dim = layout.kda_heads, layout.config.kda_head_dim
        front = self._matrix("kda", layer, "front")
        beta = self.weights.beta[slot, :heads].T
        wide = 4 * layout.kda_width
        return KdaWeights(
            in_proj=jnp.concatenate([front[:, :wide], beta, front[:, wide:]], axis=1),
            decay=self._matrix("kda", layer, "rate"),
            taps=vectors.taps[slot],
            a_log=jnp.log(vectors.slope[slot, 0, ::dim]),
            dt_bias=vectors.dt_bias[slot, 0].reshape(heads, dim),
            norm=vectors.norm[slot, 0],
            out_proj=self._matrix("kda", layer, "out"),
        )

    def _mla(self, layer: Any, slot: Any) -> MlaWeights:
        config, heads = self.model.layout.config, range(self.model.layout.mla_heads)
        gains = self.weights.low_gain[slot, 0]
        parts = [self._matrix("mla", layer, name) for name in ("front", "gate")]
        return MlaWeights(
            in_proj=jnp.concatenate(parts, axis=1),
            q_norm=gains[: config.q_lora_rank],
            row_norm=gains[config.q_lora_rank :],
            q_b=self._matrix("mla", layer, "query"),
            key_up=jnp.stack([self._matrix("mla", layer, key_up(head)) for head in heads]),
            value_up=jnp.stack([self._matrix("mla", layer, value_up(head)).T for head in heads]),
            out_proj=self._matrix("mla", layer, "out"),
        )

    def _gated(self, segment: str, layer: Any) -> MlpWeights:
        names = ("gate_up", "down")
        return MlpWeights(*(self._matrix(segment, layer, name) for name in names))

    def _experts(self, layer: Any, slot: Any) -> MoeWeights:
        layout, row = self.model.layout, self.weights.router[slot, 0]
        latent, router = jnp.split(
            self._matrix("moe", layer, "front"), [layout.latent_columns], axis=1
        )
        return MoeWeights(
            in_proj=jnp.concatenate([router, latent], axis=1),
            router_bias=row[: layout.config.num_experts],
            norm=row[bias_columns(layout) :],
            up=self._matrix("moe", layer, "up"),
            shared=self._gated("moe", layer),
            experts=ImagedExperts(self.model.expert_shape, self.weights.experts, slot),
        )

    def _matrix(self, segment: str, layer: Any, name: str) -> jax.Array:
        """A matrix of a layer's mixer or feed-forward part."""
        plan = self.model.stream
        number = 2 * layer + (segment in ("dense", "moe"))
        pos = jnp.array(plan.starts, jnp.int32)[number]
        return unpack_matrix(plan, self.weights.image, segment, pos, name)


def head_matrix(model: KernelModel, weights: KernelWeights) -> jax.Array:
    """[D, columns of the rank's head]."""
    plan = model.stream
    return unpack_matrix(plan, weights.image, "head", plan.starts[-1], "head")
