"""The layers on one rank, as loops over repeated periods; what they read is mixed of blocks.

Runs inside ``shard_map`` over the ranks; every weight and cache is one rank's share.

Letters: M tokens, D hidden, B blocks of the attention residual.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from kda_mla_kernels import norm, residual
from kda_mla_kernels.backend import Batch, Carry, Memory, Slot, sum_over_ranks
from kda_mla_kernels.moe import StackedExperts

from megakernel_kimi.config import KimiConfig
from megakernel_kimi.segments import Segment, segments
from megakernel_kimi.weights import KdaWeights, LayerWeights, MlpWeights, MoeWeights
from megakernel_kimi.xla.attention import delta_attention, latent_attention
from megakernel_kimi.xla.feed_forward import dense_mlp, mixture_of_experts
from megakernel_kimi.xla.rank import Rank

__all__ = ["HeldLayers", "Layers", "Residual", "Run", "Stream", "run_layers"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residual:
    """The attention residual: finished blocks and the sum inside the current one."""

    prefix: jax.Array
    """[M, D]"""
    blocks: jax.Array
    """[B, M, D], zero where not yet finished"""

    def read(self, rank: Rank, vector: jax.Array, finished: jax.Array | int) -> jax.Array:
        """The mixture of the finished blocks and the prefix under a mixing vector."""
        eps = rank.layout.config.rms_norm_eps
        scores = residual.scores(self.blocks, vector, eps)
        there = jnp.arange(len(self.blocks))[:, None] < finished
        return residual.mix_scored(
            self.blocks,
            jnp.where(there, scores, -jnp.inf),
            self.prefix,
            residual.scores(self.prefix, vector, eps),
            rank.numerics,
        )

    def add(self, rank: Rank, update: jax.Array) -> Residual:
        """Adds a sublayer's output to the prefix."""
        total = self.prefix.astype(jnp.float32) + update.astype(jnp.float32)
        return replace(self, prefix=rank.numerics.round(total))

    def close_block(self, starts: jax.Array | bool, block: jax.Array | int) -> Residual:
        """Where ``starts``, keeps the prefix as a finished block and empties it."""
        place = jnp.where(starts, block, len(self.blocks))  # behind the last: dropped
        blocks = self.blocks.at[place].set(self.prefix, mode="drop")
        return Residual(jnp.where(starts, 0, self.prefix), blocks)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stream:
    """What travels through the layers."""

    residual: Residual
    features: jax.Array
    """[F, M, D] the prefix that enters each feature layer"""
    carry: Carry


@dataclass(frozen=True)
class Run:
    """What is the same for all layers of one call."""

    rank: Rank
    batch: Batch
    memory: Memory
    feature_layers: tuple[int, ...]

    def keep_features(self, stream: Stream, layer: Slot) -> Stream:
        """Keeps the prefix if ``layer`` is a feature layer; beyond the last it is the final one."""
        if not self.feature_layers:
            return stream
        place = [len(self.feature_layers)] * (self.rank.layout.config.num_hidden_layers + 1)
        for i, feature in enumerate(self.feature_layers):
            place[feature] = i
        where = stream.features.at[jnp.array(place)[layer]]
        return replace(stream, features=where.set(stream.residual.prefix, mode="drop"))

    def layer(self, stream: Stream, weights: LayerWeights, layer: Slot, slot: Slot) -> Stream:
        """One layer: attention, then feed-forward, each reading a mixture."""
        rank, config = self.rank, self.rank.layout.config
        size = config.attn_res_block_size
        stream = self.keep_features(stream, layer)
        before = (layer + size - 1) // size
        x = stream.residual.read(rank, weights.attention_mix, before)
        left = stream.residual.close_block(layer % size == 0, layer // size)
        x = norm.stepwise_rms_norm(x, weights.attention_norm, config.rms_norm_eps, rank.numerics)
        partial, carry = self._attend(weights, x, stream.carry, slot)
        left = left.add(rank, rank.numerics.round(sum_over_ranks(partial)))

        x = left.read(rank, weights.ffn_mix, layer // size + 1)
        x = norm.stepwise_rms_norm(x, weights.ffn_norm, config.rms_norm_eps, rank.numerics)
        if isinstance(weights.ffn, MlpWeights):
            out = dense_mlp(rank, weights.ffn, x)
        else:
            out = mixture_of_experts(rank, weights.ffn, x, self.batch.alone)
        return Stream(left.add(rank, out), stream.features, carry)

    def _attend(
        self, weights: LayerWeights, x: jax.Array, carry: Carry, slot: Slot
    ) -> tuple[jax.Array, Carry]:
        if isinstance(weights.attention, KdaWeights):
            return delta_attention(
                self.rank, weights.attention, x, self.batch, carry, slot, self.memory
            )
        return latent_attention(self.rank, weights.attention, x, self.batch, carry, slot)

    def segment(self, stream: Stream, segment: Segment, layers: Layers) -> Stream:
        """The layers of a segment, as a loop over its turns."""
        config = self.rank.layout.config
        kinds = [form.attention for form in segment.forms]
        firsts = [config.attention_index(segment.first + i) for i in range(segment.period)]

        def turn(stream: Stream, step: tuple[Slot, Any]) -> tuple[Stream, None]:
            number, part = step
            for i in range(segment.period):
                weights = layers.member(segment, number, part, i)
                layer = segment.first + number * segment.period + i
                slot = firsts[i] + number * kinds.count(kinds[i])
                stream = self.layer(stream, weights, layer, slot)
            return stream, None

        stacked = layers.stacked(segment)
        if segment.turns == 1:
            return turn(stream, (0, jax.tree.map(lambda x: x[0], stacked)))[0]
        return lax.scan(turn, stream, (jnp.arange(segment.turns), stacked))[0]


class Layers(Protocol):
    """Where the weights of layers come from."""

    def stacked(self, segment: Segment) -> Any:
        """A pytree of arrays with one entry per turn of the segment, which a loop cuts."""
        ...

    def member(self, segment: Segment, turn: Slot, part: Any, index: int) -> LayerWeights:
        """Layer ``index`` of a turn; ``part`` is the turn's entry of ``stacked``."""
        ...


@dataclass(frozen=True)
class HeldLayers:
    """Layers as :class:`~megakernel_kimi.weights.KimiWeights` holds them.

    Attributes:
        by_first: the members of each segment's period, by the segment's first layer.
    """

    by_first: dict[int, tuple[LayerWeights, ...]]

    @classmethod
    def of(cls, config: KimiConfig, held: tuple[tuple[LayerWeights, ...], ...]) -> HeldLayers:
        """The layers of all segments."""
        firsts = [segment.first for segment in segments(config)]
        return cls(dict(zip(firsts, held, strict=True)))

    def stacked(self, segment: Segment) -> tuple[LayerWeights, ...]:
        """Everything but the experts, which a loop must leave in place."""
        return tuple(_without_experts(member) for member in self.by_first[segment.first])

    def member(
        self, segment: Segment, turn: Slot, part: tuple[LayerWeights, ...], index: int
    ) -> LayerWeights:
        """See the protocol."""
        held = self.by_first[segment.first][index].ffn
        if isinstance(held, MlpWeights):
            return part[index]
        experts = StackedExperts(held.experts, turn)
        rest = part[index].ffn
        assert isinstance(rest, MoeWeights)
        return replace(part[index], ffn=replace(rest, experts=experts))


def _without_experts(member: LayerWeights) -> LayerWeights:
    if isinstance(member.ffn, MlpWeights):
        return member
    return replace(member, ffn=replace(member.ffn, experts=None))


def run_layers(run: Run, layers: Layers, hidden: jax.Array, carry: Carry) -> Stream:
    """All decoder layers on embedded tokens [M, D]."""
    config = run.rank.layout.config
    left = Residual(hidden, jnp.zeros((config.num_blocks, *hidden.shape), hidden.dtype))
    features = jnp.zeros((len(run.feature_layers), *hidden.shape), hidden.dtype)
    stream = Stream(left, features, carry)
    for segment in segments(config):
        stream = run.segment(stream, segment, layers)
    return run.keep_features(stream, config.num_hidden_layers)
