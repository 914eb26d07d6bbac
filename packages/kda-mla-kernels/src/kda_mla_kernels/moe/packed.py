"""Routed experts that stay packed in memory (MXFP4): decoded a few at a time, when they are used.

Two forms of the same sum. :func:`packed_experts` runs every row through each expert that some row
chose, which suits the few rows of a decode step; a row's result depends on its own routes alone,
bit for bit. :func:`packed_experts_in_tiles` runs each expert on tiles of the rows that chose it,
which suits a chunk of a prompt. Neither holds more than a few decoded experts.

Unlike in ``experts``, an expert's output is not rounded before it is weighed: with a slice of every
expert on each of several ranks it is only part of a sum.

Letters: M tokens, E experts held, F their channels, C latent width, B experts decoded at once, T
rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.moe.experts import Activation
from kda_mla_kernels.moe.router import Routes, dense_weights
from kda_mla_kernels.moe.routes import sort_routes
from kda_mla_kernels.numerics import Numerics
from kda_mla_kernels.quant.mxfp4 import decode_halves, evens_first

__all__ = [
    "HeldExperts",
    "Packed",
    "PackedExperts",
    "StackedExperts",
    "decoded_at_once",
    "packed_experts",
    "packed_experts_in_tiles",
]

_DECODED_BYTES = 64 << 20
"""Most bytes of decoded experts at a time, one expert excepted."""
_MOST_AT_ONCE = 16
_TILES = (8, 256)
"""Fewest and most rows of a tile."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedExperts:
    """Slices of experts, in stacks of layers: u8 arrays, or their shapes."""

    gate_up: Any
    """[layers, E, 2F, C/2], gate rows before up rows, as stored"""
    gate_up_scales: Any
    """[layers, E, 2F, C/32]"""
    down: Any
    """[layers, E, F/2, C], turned, so that a narrow slice fills whole lanes"""
    down_scales: Any
    """[layers, E, F/32, C]"""


@dataclass(frozen=True)
class StackedExperts:
    """One layer's experts, left in the stacks of all layers."""

    stacks: PackedExperts
    layer: jax.Array | int
    """index in the stacks"""

    @property
    def experts(self) -> int:
        """E."""
        return self.stacks.gate_up.shape[1]

    @property
    def at_once(self) -> int:
        """B."""
        _, experts, rows, half = self.stacks.gate_up.shape
        return decoded_at_once(experts, rows // 2, 2 * half)

    def decoded(self, experts: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Some experts i32 [B]: gate and up [B, 2F, C], down [B, F, C]; the inputs of each evens
        first."""
        found: PackedExperts = jax.tree.map(lambda x: x[self.layer, experts], self.stacks)
        return (
            decode_halves(found.gate_up, found.gate_up_scales, 2, dtype),
            decode_halves(found.down, found.down_scales, 1, dtype),
        )


def decoded_at_once(experts: int, channels: int, latent: int) -> int:
    """B: how many experts to decode at a time."""
    decoded = 3 * channels * latent * 2
    return max(1, min(_MOST_AT_ONCE, experts, _DECODED_BYTES // decoded))


class Packed(Protocol):
    """Packed experts of one layer, however they are packed."""

    @property
    def experts(self) -> int:
        """E."""
        ...

    @property
    def at_once(self) -> int:
        """B."""
        ...

    def decoded(self, experts: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """See :meth:`StackedExperts.decoded`."""
        ...


@dataclass(frozen=True)
class HeldExperts:
    """The experts of one layer on one rank."""

    packed: Packed
    first: jax.Array | int
    """id of the first expert held"""
    dtype: Any
    """that they are decoded to"""

    def local(self, routes: Routes) -> Routes:
        """The routes with ids counted from the first expert held."""
        return Routes(routes.experts - self.first, routes.weights)

    def run(
        self, x: jax.Array, experts: jax.Array, activation: Activation, numerics: Numerics
    ) -> jax.Array:
        """Rows [B, rows, C], evens first, through the experts i32 [B]: f32 [B, rows, C]."""
        gate_up, down = self.packed.decoded(experts, self.dtype)
        both = numerics.round(numerics.dot_rows_each(x, gate_up))
        gate, up = jnp.split(both, 2, axis=-1)
        return numerics.dot_each(evens_first(activation(gate, up)), down)


def packed_experts(
    x: jax.Array, held: HeldExperts, routes: Routes, activation: Activation, numerics: Numerics
) -> jax.Array:
    """``Σ_e p_e expert_e(x)`` over the experts held, in ascending order of their ids.

    An expert that a row did not choose adds zero to it, so the order and the bits of a row's sum do
    not depend on the routes of others.

    Args:
        x: [M, C].

    Returns:
        f32 [M, C], not yet rounded.
    """
    at_once = held.packed.at_once
    shares = dense_weights(held.local(routes), held.packed.experts)  # [M, E]
    wanted = jnp.any(shares != 0, axis=0)
    order = jnp.argsort(~wanted, stable=True)
    order = jnp.pad(order, (0, -len(order) % at_once))
    count = jnp.sum(wanted)
    rows = jnp.broadcast_to(evens_first(x), (at_once, *x.shape))

    def step(index: jax.Array, total: jax.Array) -> jax.Array:
        place = index * at_once
        experts = lax.dynamic_slice_in_dim(order, place, at_once)
        out = held.run(rows, experts, activation, numerics)
        mine = jnp.where(place + jnp.arange(at_once) < count, shares[:, experts], 0.0)
        for i in range(at_once):
            total += mine[:, i, None] * out[i]
        return total

    steps = (count + at_once - 1) // at_once
    return lax.fori_loop(0, steps, step, jnp.zeros(x.shape, jnp.float32))


def _tile_rows(routes: int, experts: int) -> int:
    """T: twice the mean rows of an expert, as a power of two."""
    fewest, most = _TILES
    return max(fewest, min(most, 1 << (2 * routes // experts).bit_length() - 1))


def packed_experts_in_tiles(
    x: jax.Array, held: HeldExperts, routes: Routes, activation: Activation, numerics: Numerics
) -> jax.Array:
    """As :func:`packed_experts`, each expert on the rows that chose it only.

    A row adds its experts in ascending order too, but its bits depend on the tile it is part of.
    """
    at_once, experts = held.packed.at_once, held.packed.experts
    by_expert = sort_routes(held.local(routes), range(experts))
    tile = _tile_rows(by_expert.tokens.size, experts)
    tiles = -(-by_expert.counts // tile)
    ends = jnp.cumsum(tiles)
    first_tile, first_route = ends - tiles, jnp.cumsum(by_expert.counts) - by_expert.counts
    ordered = evens_first(x)

    def step(index: jax.Array, total: jax.Array) -> jax.Array:
        items = index * at_once + jnp.arange(at_once)
        expert = jnp.searchsorted(ends, items, side="right")
        expert = jnp.minimum(expert, experts - 1)
        inside = (items - first_tile[expert])[:, None] * tile + jnp.arange(tile)
        real = (inside < by_expert.counts[expert][:, None]) & (items < ends[-1])[:, None]
        place = jnp.where(real, first_route[expert][:, None] + inside, 0)
        rows = by_expert.tokens[place]
        out = held.run(ordered[rows], expert, activation, numerics)
        out = out * by_expert.weights[place][..., None]
        where = jnp.where(real, rows, len(x))  # behind the last row: dropped
        return total.at[where.ravel()].add(out.reshape(-1, x.shape[1]), mode="drop")

    steps = (ends[-1] + at_once - 1) // at_once
    return lax.fori_loop(0, steps, step, jnp.zeros(x.shape, jnp.float32))
