"""The model on one rank, as a sequence of stages: embedding, layers, head.

Runs inside ``shard_map`` over the axis ``RANKS``; every weight and cache is one rank's share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from kda_mla_kernels import norm

from megakernel_qwen.config import QwenConfig
from megakernel_qwen.weights import GdnWeights, LayerWeights, QwenWeights
from megakernel_qwen.xla.batch import Batch
from megakernel_qwen.xla.caches import Caches, Records
from megakernel_qwen.xla.mixers import (
    Memory,
    Rank,
    Slot,
    feed_forward,
    gated_attention,
    gated_delta_net,
)

__all__ = ["RANKS", "Stream", "embed", "for_each_layer", "head", "run_layers"]

RANKS = "ranks"
"""Mesh axis over which everything is split."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stream:
    """What travels through the layers."""

    hidden: jax.Array
    """[M, D] the residual stream"""
    features: jax.Array
    """[F, M, D] the residual stream after each feature layer"""
    caches: Caches
    records: Records | None


def sum_over_ranks(partial: jax.Array) -> jax.Array:
    """f32 sum of every rank's partial result."""
    return lax.psum(partial, RANKS)


def embed(rank: Rank, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of the sharded table: i32 [M] -> [M, D] in the activation dtype."""
    local = tokens - lax.axis_index(RANKS) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.where(mine, local, 0)]
    return rank.numerics.round(
        sum_over_ranks(jnp.where(mine[:, None], rows, 0).astype(jnp.float32))
    )


def _layer(
    rank: Rank, weights: LayerWeights, stream: Stream, batch: Batch, slot: Slot, memory: Memory
) -> Stream:
    """``x <- x + mixer(norm(x))``, then ``x <- x + mlp(norm(x))``, each sum rounded."""
    numerics, eps = rank.numerics, rank.layout.config.rms_norm_eps

    def add(x: jax.Array, partial: jax.Array) -> jax.Array:
        whole = numerics.round(sum_over_ranks(partial))
        return numerics.round(x.astype(jnp.float32) + whole.astype(jnp.float32))

    carry = (stream.caches, stream.records)
    x = stream.hidden
    normed = norm.rms_norm(x, weights.mixer_gain, eps, numerics)
    if isinstance(weights.mixer, GdnWeights):
        partial, carry = gated_delta_net(rank, weights.mixer, normed, batch, carry, slot, memory)
    else:
        partial, carry = gated_attention(rank, weights.mixer, normed, batch, carry, slot)
    x = add(x, partial)
    normed = norm.rms_norm(x, weights.mlp_gain, eps, numerics)
    x = add(x, feed_forward(rank, weights.mlp, normed))
    return Stream(x, stream.features, *carry)


Body: TypeAlias = Callable[[Stream, LayerWeights, Slot, Slot], Stream]
"""``body(stream, weights, layer, slot)``"""


def for_each_layer(
    config: QwenConfig, layers: tuple[LayerWeights, ...], stream: Stream, body: Body
) -> Stream:
    """Runs the layers in order, unrolled or, for stacked weights, as a scan over periods."""
    kinds = config.layer_types[: len(layers)]
    counts = {kind: kinds.count(kind) for kind in kinds}
    slots = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]

    def period(stream: Stream, step: tuple[Slot, tuple[LayerWeights, ...]]) -> tuple[Stream, None]:
        index, members = step
        for i, weights in enumerate(members):
            slot = index * counts[kinds[i]] + slots[i]
            stream = body(stream, weights, index * len(kinds) + i, slot)
        return stream, None

    periods = config.num_layers // len(layers)
    if periods == 1:
        return period(stream, (0, layers))[0]
    return lax.scan(period, stream, (jnp.arange(periods), layers))[0]


def run_layers(
    rank: Rank,
    layers: tuple[LayerWeights, ...],
    stream: Stream,
    batch: Batch,
    memory: Memory,
    feature_layers: tuple[int, ...],
) -> Stream:
    """All decoder layers, keeping the residual stream after the feature layers."""
    config = rank.layout.config
    place = [len(feature_layers)] * config.num_layers  # behind the array: dropped
    for i, layer in enumerate(feature_layers):
        place[layer] = i
    places = jnp.array(place)

    def body(stream: Stream, weights: LayerWeights, layer: Slot, slot: Slot) -> Stream:
        stream = _layer(rank, weights, stream, batch, slot, memory)
        if not feature_layers:
            return stream
        kept = stream.features.at[places[layer]].set(stream.hidden, mode="drop")
        return Stream(stream.hidden, kept, stream.caches, stream.records)

    return for_each_layer(config, layers, stream, body)


def head(rank: Rank, weights: QwenWeights, hidden: jax.Array) -> jax.Array:
    """Final norm and logits of the whole vocabulary, on every rank: [M, D] -> f32 [M, V]."""
    eps = rank.layout.config.rms_norm_eps
    normed = norm.rms_norm(hidden, weights.final_gain, eps, rank.numerics)
    mine = rank.numerics.dot_rows(normed, weights.head_table)
    logits = lax.all_gather(mine, RANKS, axis=1, tiled=True)
    return logits[:, : rank.layout.config.vocab_size]
