"""What sequences leave behind, per rank, and the records that a verify step keeps for its commit.

Letters: R rows, L context slots, W convolution taps, C channels, Hv value heads, K key dim,
V value dim, G key/value heads, D head dim; Nl linear layers, Nf full-attention layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from kda_mla_kernels.gdn import DeltaStep, replay

from megakernel_qwen.layout import QwenLayout

__all__ = ["Caches", "Records", "cache_shapes", "commit_records", "layer_rows"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Caches:
    """The state of all rows on one rank: arrays, or their shapes before they exist."""

    tail: Any
    """[Nl, R, tail rows, C] the last W-1 inputs of each short convolution, oldest first, then
    padding that nobody reads"""
    delta: Any
    """f32 [Nl, R, Hv, K, V] recurrent states"""
    keys: Any
    """[Nf, R, G, D, L] normed and rotated, as columns"""
    values: Any
    """[Nf, R, G, L, D]"""

    @property
    def slots(self) -> int:
        """L, of one rank's caches and of all ranks' alike."""
        return self.keys.shape[-1]

    def tails_of(self, slot: jax.Array | int, rows: jax.Array | None, inputs: int) -> jax.Array:
        """One layer's last ``inputs`` inputs of some rows (None: all rows)."""
        return layer_rows(self.tail, slot, rows)[:, :inputs]

    def put_tails(self, slot: jax.Array | int, rows: jax.Array | None, tails: jax.Array) -> Caches:
        """Writes one layer's tails [S, W-1, C] of some rows back (None: all rows)."""
        every = slice(None) if rows is None else rows
        return replace(self, tail=self.tail.at[slot, every, : tails.shape[1]].set(tails))


def layer_rows(part: jax.Array, slot: jax.Array | int, rows: jax.Array | None) -> jax.Array:
    """One layer of ``tail`` or ``delta`` for some rows (None: all)."""
    layer = jax.lax.dynamic_index_in_dim(part, slot, keepdims=False)
    return layer if rows is None else layer[rows]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Records:
    """What a verify step over S sequences of T tokens would have done to the state."""

    window: jax.Array
    """[Nl, S, W-1+T, C] convolution inputs: the tail before, then the T tokens"""
    steps: DeltaStep
    """fields [Nl, M, ...]: token t of sequence s is entry s·T + t, the rest is padding"""
    tokens: int = field(metadata={"static": True})
    """T"""


def cache_shapes(layout: QwenLayout, rows: int, slots: int, held: jnp.dtype) -> Caches:
    """Shapes and dtypes of one rank's caches, as a pytree of ``jax.ShapeDtypeStruct``."""
    config = layout.config
    linear, full = len(config.linear_layers), len(config.full_layers)
    dims = (config.linear_key_head_dim, config.linear_value_head_dim)
    lead, dim = (full, rows, layout.kv_heads), config.head_dim
    return Caches(
        tail=jax.ShapeDtypeStruct((linear, rows, layout.tail_rows, layout.conv_channels), held),
        delta=jax.ShapeDtypeStruct((linear, rows, layout.value_heads, *dims), jnp.float32),
        keys=jax.ShapeDtypeStruct((*lead, dim, slots), held),
        values=jax.ShapeDtypeStruct((*lead, slots, dim), held),
    )


def commit_records(
    caches: Caches, records: Records, rows: jax.Array, accepted: jax.Array
) -> Caches:
    """Moves the recurrent state of each verified row by its first ``accepted[s]`` tokens.

    Keys and values need nothing: those of rejected tokens lie behind the row's position, where
    no query sees them until they are written anew.
    """
    sequences, tokens = records.window.shape[1], records.tokens
    inputs = records.window.shape[2] - tokens
    flat = jnp.arange(records.steps.decay.shape[1])
    owner = jnp.minimum(flat // tokens, sequences - 1)
    counts = (flat < sequences * tokens) & (flat % tokens < accepted[owner])

    def tail_after(window: jax.Array, count: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(window, count, inputs, axis=1)

    tails = jax.vmap(tail_after, in_axes=(1, 0), out_axes=1)(records.window, accepted)
    moved = jax.vmap(replay, in_axes=(0, 0, None, None))(
        caches.delta[:, rows], records.steps, owner, counts
    )
    return replace(
        caches,
        tail=caches.tail.at[:, rows, :inputs].set(tails),
        delta=caches.delta.at[:, rows].set(moved),
    )
