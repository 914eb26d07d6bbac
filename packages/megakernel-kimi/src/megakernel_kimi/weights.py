"""The weights of a model as the ranks hold them.

Every array has a leading rank axis, sharded over the mesh; rank r's part is all it ever needs. Each
member of a segment's period is one entry, with the segment's turns as the axis after the ranks.
Matrices are [in, out] (tables stay [rows, hidden]); projections that read the same input stand side
by side in one matrix. Small vectors are f32. Routed experts stay as the checkpoint has them, MXFP4.

Letters: D hidden, W convolution taps, H KDA heads of the rank, K their dim, A MLA heads of the
rank, N own key dims, S shared key dims, V value dim, Q query latent, C cached latent, E experts,
L experts' latent, F channels of the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from kda_mla_kernels.moe import PackedExperts

from megakernel_kimi.layout import KimiLayout
from megakernel_kimi.segments import LayerForm, segments

__all__ = [
    "KdaWeights",
    "KimiWeights",
    "LayerWeights",
    "MlaWeights",
    "MlpWeights",
    "MoeWeights",
    "weight_shapes",
]

Array: TypeAlias = Any
"""A numpy array while loading, a jax array afterwards, or its shape before."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KdaWeights:
    """Kimi delta attention."""

    in_proj: Array
    """[D, q k v | gate | beta | first factor of the decay]"""
    decay: Array
    """[K, H K] second factor"""
    taps: Array
    """f32 [W, 3 H K]"""
    a_log: Array
    """f32 [H]"""
    dt_bias: Array
    """f32 [H, K]"""
    norm: Array
    """f32 [K]"""
    out_proj: Array
    """[H K, D]"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MlaWeights:
    """Latent attention."""

    in_proj: Array
    """[D, the lane's columns of q_a | of kv_a | gate]"""
    q_norm: Array
    """f32 [Q]"""
    row_norm: Array
    """f32 [C]"""
    q_b: Array
    """[Q, A (N + S)]"""
    key_up: Array
    """[A, N, C]"""
    value_up: Array
    """[A, V, C]"""
    out_proj: Array
    """[A V, D]"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MlpWeights:
    """A gated feed-forward layer."""

    gate_up: Array
    """[D, gate | up]"""
    down: Array
    """[F, D]"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoeWeights:
    """A latent mixture of experts."""

    in_proj: Array
    """[D, the lane's columns of the router | of the projection to the latent]"""
    router_bias: Array
    """f32 [E]"""
    norm: Array
    """f32 [L]"""
    up: Array
    """[L, the lane's columns of D]"""
    shared: MlpWeights
    experts: Any
    """``PackedExperts``, stacks of all layers; in a loop over layers None, then ``Packed``"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    attention_mix: Array
    """f32 [D] mixing vector of what the attention reads"""
    attention_norm: Array
    """f32 [D]"""
    attention: KdaWeights | MlaWeights
    ffn_mix: Array
    ffn_norm: Array
    ffn: MlpWeights | MoeWeights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KimiWeights:
    """A whole model."""

    embedding: Array
    """[vocabulary rows of the rank, D]"""
    segments: tuple[tuple[LayerWeights, ...], ...]
    """per segment one entry for each member of its period"""
    output_mix: Array
    """f32 [D]"""
    final_norm: Array
    """f32 [D]"""
    head: Array
    """[vocabulary rows of the rank, D]"""


@dataclass(frozen=True)
class _Shapes:
    """Shapes of one layer on one rank."""

    layout: KimiLayout
    dtype: np.dtype

    def matrix(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def vector(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def mlp(self, channels: int) -> MlpWeights:
        hidden = self.layout.config.hidden_size
        return MlpWeights(self.matrix(hidden, 2 * channels), self.matrix(channels, hidden))

    def kda(self) -> KdaWeights:
        layout, config = self.layout, self.layout.config
        heads, dim, width = layout.kda_heads, config.kda_head_dim, layout.kda_width
        return KdaWeights(
            in_proj=self.matrix(config.hidden_size, sum(layout.kda_columns)),
            decay=self.matrix(dim, width),
            taps=self.vector(config.conv_kernel_size, 3 * width),
            a_log=self.vector(heads),
            dt_bias=self.vector(heads, dim),
            norm=self.vector(dim),
            out_proj=self.matrix(width, config.hidden_size),
        )

    def mla(self) -> MlaWeights:
        layout, config = self.layout, self.layout.config
        heads, latent = layout.mla_heads, config.kv_lora_rank
        return MlaWeights(
            in_proj=self.matrix(config.hidden_size, sum(layout.mla_columns)),
            q_norm=self.vector(config.q_lora_rank),
            row_norm=self.vector(latent),
            q_b=self.matrix(config.q_lora_rank, heads * config.qk_head_dim),
            key_up=self.matrix(heads, config.qk_nope_head_dim, latent),
            value_up=self.matrix(heads, config.v_head_dim, latent),
            out_proj=self.matrix(layout.value_width, config.hidden_size),
        )

    def moe(self) -> MoeWeights:
        layout, config = self.layout, self.layout.config
        latent = config.routed_expert_hidden_size
        return MoeWeights(
            in_proj=self.matrix(config.hidden_size, layout.router_columns + layout.latent_columns),
            router_bias=self.vector(config.num_experts),
            norm=self.vector(latent),
            up=self.matrix(latent, layout.hidden_columns),
            shared=self.mlp(layout.shared_channels),
            experts=self.experts(),
        )

    def experts(self) -> PackedExperts:
        layout, latent = self.layout, self.layout.config.routed_expert_hidden_size
        held, channels = layout.experts, layout.expert_channels

        def packed(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((held, *shape), jnp.uint8)

        return PackedExperts(
            gate_up=packed(2 * channels, latent // 2),
            gate_up_scales=packed(2 * channels, latent // 32),
            down=packed(channels // 2, latent),
            down_scales=packed(channels // 32, latent),
        )

    def layer(self, form: LayerForm) -> LayerWeights:
        vector = self.vector(self.layout.config.hidden_size)
        return LayerWeights(
            attention_mix=vector,
            attention_norm=vector,
            attention=self.kda() if form.attention == "kda" else self.mla(),
            ffn_mix=vector,
            ffn_norm=vector,
            ffn=self.mlp(self.layout.dense_channels) if form.dense else self.moe(),
        )


def weight_shapes(layout: KimiLayout, dtype: np.dtype) -> KimiWeights:
    """Shapes and dtypes of one rank's weights; ``dtype`` is that of matrices and tables."""
    shapes, hidden = _Shapes(layout, dtype), layout.config.hidden_size

    def stacked(form: LayerForm, turns: int) -> LayerWeights:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((turns, *x.shape), x.dtype), shapes.layer(form)
        )

    return KimiWeights(
        embedding=shapes.matrix(layout.vocab_rows, hidden),
        segments=tuple(
            tuple(stacked(form, segment.turns) for form in segment.forms)
            for segment in segments(layout.config)
        ),
        output_mix=shapes.vector(hidden),
        final_norm=shapes.vector(hidden),
        head=shapes.matrix(layout.vocab_rows, hidden),
    )
