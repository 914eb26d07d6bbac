"""The weights as the decode kernel reads them.

Letters: D hidden, B beta rows, N embedding rows of a rank; Nk KDA layers, Nm MLA layers, Ne layers
of experts; E experts of the model, C their latent width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from kda_mla_kernels.embedding import table_rows
from kda_mla_kernels.kda.kernel import KdaVectors
from kda_mla_kernels.moe.kernel import ExpertImages, ExpertShape
from vmem_pool.tiling import LANES

from megakernel_kimi.kernel.stream import stream_plan
from megakernel_kimi.layout import KimiLayout

__all__ = [
    "HIDDEN_VECTORS",
    "MIX",
    "NORM",
    "KernelWeights",
    "beta_rows",
    "bias_columns",
    "weight_shapes",
]

Array = Any
BETA_TILE_ROWS = 16
MIX, NORM = range(2)
HIDDEN_VECTORS = 2
"""Rows of width D of each sublayer: its mixing vector and its norm weight; behind the last sublayer
those of the head."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelWeights:
    """A whole model on every rank: arrays or their shapes outside, references in the kernel."""

    image: Array
    """u8 [slots, slot rows, 128], the weight stream"""
    experts: ExpertImages
    """u8 [Ne, experts of this rank, ...]"""
    embedding: Array
    """[N, D], zero rows behind the vocabulary"""
    hidden: Array
    """f32 [sublayers + 1, 2, D], see :data:`HIDDEN_VECTORS`"""
    beta: Array
    """[Nk, B, D], rows of the projection to beta"""
    router: Array
    """f32 [Ne, 1, E padded + C], bias of the choice, then weight of the sum's norm"""
    low_gain: Array
    """f32 [Nm, 1, q_lora + kv_lora], norm weights of low-rank queries and of latents"""
    kda: KdaVectors


def beta_rows(layout: KimiLayout) -> int:
    """B: one for each KDA head of a rank, in whole tiles."""
    return -(-layout.kda_heads // BETA_TILE_ROWS) * BETA_TILE_ROWS


def bias_columns(layout: KimiLayout) -> int:
    """Lanes of the router's bias, in whole tiles."""
    return -(-layout.config.num_experts // LANES) * LANES


def weight_shapes(layout: KimiLayout, experts: ExpertShape, dtype: Any) -> KernelWeights:
    """Shapes and dtypes of one rank's weights."""
    config = layout.config
    hidden, wide = config.hidden_size, layout.kda_width
    kda, mla, moe = (len(x) for x in (config.kda_layers, config.mla_layers, config.moe_layers))

    def vectors(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.float32)

    def held(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    images = experts.image_shapes(moe, experts.experts)
    return KernelWeights(
        image=jax.ShapeDtypeStruct(stream_plan(layout, dtype).image_shape, np.uint8),
        experts=ExpertImages(
            *(
                jax.ShapeDtypeStruct(shape, np.uint8)
                for shape in (images.gate_up, images.down, images.scales)
            )
        ),
        embedding=held(table_rows(layout.vocab_rows), hidden),
        hidden=vectors(2 * config.num_hidden_layers + 1, HIDDEN_VECTORS, hidden),
        beta=held(kda, beta_rows(layout), hidden),
        router=vectors(moe, 1, bias_columns(layout) + config.routed_expert_hidden_size),
        low_gain=vectors(mla, 1, config.q_lora_rank + config.kv_lora_rank),
        kda=KdaVectors(
            taps=vectors(kda, config.conv_kernel_size, 3 * wide),
            slope=vectors(kda, 1, wide),
            dt_bias=vectors(kda, 1, wide),
            norm=vectors(kda, 1, config.kda_head_dim),
        ),
    )
