"""The model on one rank, as a sequence of stages: embedding, layers, head.

Runs inside ``shard_map`` over the axis ``RANKS``; every weight and cache is one rank's share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from kda_mla_kernels import norm

from megakernel_qwen.config import QwenConfig
from megakernel_qwen.layout import RANKS
from megakernel_qwen.weights import GdnWeights, LayerWeights
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

__all__ = [
    "HeldLayers",
    "Layers",
    "Stream",
    "embed",
    "for_each_layer",
    "gather_logits",
    "run_layers",
]


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
    rows_of_a_rank = rank.layout.vocab_rows
    local = tokens - lax.axis_index(RANKS) * rows_of_a_rank
    mine = (local >= 0) & (local < rows_of_a_rank)
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


class Layers(Protocol):
    """Where the weights of the layers come from: a loop over periods of a few layers each."""

    @property
    def period(self) -> int:
        """Layers of a turn of the loop; the number of layers is a multiple."""
        ...

    @property
    def stacked(self) -> Any:
        """A pytree of arrays with one entry per turn."""
        ...

    def member(self, turn: Slot, part: Any, index: int) -> LayerWeights:
        """Layer ``turn · period + index``; ``part`` is this turn's entry of ``stacked``."""
        ...


@dataclass(frozen=True)
class HeldLayers:
    """Layers as :class:`~megakernel_qwen.weights.QwenWeights` holds them: one entry per layer or,
    stacked, one per layer of a period."""

    stacked: tuple[LayerWeights, ...]

    @property
    def period(self) -> int:
        return len(self.stacked)

    def member(self, turn: Slot, part: tuple[LayerWeights, ...], index: int) -> LayerWeights:
        return part[index]


def for_each_layer(config: QwenConfig, layers: Layers, stream: Stream, body: Body) -> Stream:
    """Runs the layers in order, unrolled or as a scan over periods."""
    kinds = config.layer_types[: layers.period]
    counts = {kind: kinds.count(kind) for kind in kinds}
    slots = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]

    def turn(stream: Stream, step: tuple[Slot, Any]) -> tuple[Stream, None]:
        number, part = step
        for i, kind in enumerate(kinds):
            slot = number * counts[kind] + slots[i]
            weights = layers.member(number, part, i)
            stream = body(stream, weights, number * len(kinds) + i, slot)
        return stream, None

    turns = config.num_layers // layers.period
    if turns == 1:
        return turn(stream, (0, layers.stacked))[0]
    return lax.scan(turn, stream, (jnp.arange(turns), layers.stacked))[0]


def run_layers(
    rank: Rank,
    layers: Layers,
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


def gather_logits(rank: Rank, mine: jax.Array) -> jax.Array:
    """f32 [M, vocabulary rows of the rank] of every rank -> f32 [M, V] on each."""
    logits = lax.all_gather(mine, RANKS, axis=1, tiled=True)
    return logits[:, : rank.layout.config.vocab_size]
