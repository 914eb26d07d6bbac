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
from kda_mla_kernels.backend import Batch, Memory, Passed, Slot, sum_over_ranks

from megakernel_qwen.config import QwenConfig
from megakernel_qwen.weights import GdnWeights, LayerWeights
from megakernel_qwen.xla.mixers import Rank, feed_forward, gated_attention, gated_delta_net

__all__ = [
    "HeldLayers",
    "Layers",
    "for_each_layer",
    "run_layers",
]


def _layer(
    rank: Rank, weights: LayerWeights, stream: Passed, batch: Batch, slot: Slot, memory: Memory
) -> Passed:
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
    return Passed(x, stream.features, *carry)


Body: TypeAlias = Callable[[Passed, LayerWeights, Slot, Slot], Passed]
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


def for_each_layer(config: QwenConfig, layers: Layers, stream: Passed, body: Body) -> Passed:
    """Runs the layers in order, unrolled or as a scan over periods."""
    kinds = config.layer_types[: layers.period]
    counts = {kind: kinds.count(kind) for kind in kinds}
    slots = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]

    def turn(stream: Passed, step: tuple[Slot, Any]) -> tuple[Passed, None]:
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
    stream: Passed,
    batch: Batch,
    memory: Memory,
    feature_layers: tuple[int, ...],
) -> Passed:
    """All decoder layers, keeping the residual stream after the feature layers."""
    config = rank.layout.config
    place = [len(feature_layers)] * config.num_layers  # behind the array: dropped
    for i, layer in enumerate(feature_layers):
        place[layer] = i
    places = jnp.array(place)

    def body(stream: Passed, weights: LayerWeights, layer: Slot, slot: Slot) -> Passed:
        stream = _layer(rank, weights, stream, batch, slot, memory)
        if not feature_layers:
            return stream
        kept = stream.features.at[places[layer]].set(stream.hidden, mode="drop")
        return Passed(stream.hidden, kept, stream.caches, stream.records)

    return for_each_layer(config, layers, stream, body)
