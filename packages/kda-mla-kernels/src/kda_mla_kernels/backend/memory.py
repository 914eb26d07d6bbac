"""How a program treats the state of linear attentions: one token, a chunk, or only a record.

A gated delta net or Kimi delta attention has a short convolution, whose last inputs stay (the
**tail**), and a recurrent state (**delta**). The **memory** of a program says what happens to both:
decode moves them by one token, prefill by a chunk, verify only records what it would do.

Letters: S sequences, T tokens of each, M flat rows, N layers of the kind, R rows of the state, W
convolution taps, C channels, H heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from kda_mla_kernels.backend.batch import Batch
from kda_mla_kernels.delta import DeltaInputs, DeltaStep, mask_tokens, recur, replay

__all__ = [
    "Carry",
    "ChunkRule",
    "DeltaCaches",
    "DeltaRecords",
    "Memory",
    "Slot",
    "Window",
    "chunk_memory",
    "commit_records",
    "decode_memory",
    "layer_rows",
    "no_records",
    "verify_memory",
]

Slot: TypeAlias = jax.Array | int
"""Index of a layer among those of its kind."""

Self = TypeVar("Self", bound="DeltaCaches")


@dataclass(frozen=True)
class DeltaCaches:
    """What linear attentions leave behind in all rows, on one rank: arrays, or their shapes.

    A model's caches add what its other attention keeps per position.
    """

    tail: Any
    """[N, R, at least W-1, C] the last W-1 inputs of each short convolution, oldest first, then
    padding that nobody reads"""
    delta: Any
    """f32 [N, R, H, K, V] recurrent states"""

    @property
    def slots(self) -> int:
        """Positions of a row that a rank has room for."""
        raise NotImplementedError

    def position_axes(self: Self) -> Self:
        """For each part its axis of positions, counted from the end; 0 where it has none."""
        raise NotImplementedError

    def tails_of(self, slot: Slot, rows: jax.Array | None, inputs: int) -> jax.Array:
        """One layer's last ``inputs`` inputs of some rows (None: all rows)."""
        return layer_rows(self.tail, slot, rows)[:, :inputs]

    def put_tails(self: Self, slot: Slot, rows: jax.Array | None, tails: jax.Array) -> Self:
        """Writes one layer's tails [S, W-1, C] of some rows back (None: all rows)."""
        every = slice(None) if rows is None else rows
        return replace(self, tail=self.tail.at[slot, every, : tails.shape[1]].set(tails))


def layer_rows(part: jax.Array, slot: Slot, rows: jax.Array | None) -> jax.Array:
    """One layer of ``tail`` or ``delta`` for some rows (None: all)."""
    layer = jax.lax.dynamic_index_in_dim(part, slot, keepdims=False)
    return layer if rows is None else layer[rows]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaRecords:
    """What a verify step over S sequences of T tokens would have done to the state."""

    window: jax.Array
    """[N, S, W-1+T, C] convolution inputs: the tail before, then the T tokens"""
    steps: DeltaStep
    """fields [N, M, ...]: token t of sequence s is entry s·T + t, the rest is padding"""
    tokens: int = field(metadata={"static": True})
    """T"""


def no_records(shapes: DeltaCaches, taps: int, batch: Batch, per_channel: bool) -> DeltaRecords:
    """Records before the first layer has written its own.

    Args:
        shapes: of one rank's caches.
        taps: W.
        per_channel: whether a decay belongs to a key channel rather than to a head.
    """
    layers, _, heads, key_dim, value_dim = shapes.delta.shape
    sequences, tokens = batch.shape
    lead = (layers, batch.flat_rows, heads)
    window = (layers, sequences, taps - 1 + tokens, shapes.tail.shape[-1])
    steps = DeltaStep(
        decay=jnp.zeros((*lead, key_dim) if per_channel else lead),
        key=jnp.zeros((*lead, key_dim)),
        update=jnp.zeros((*lead, value_dim)),
    )
    return DeltaRecords(jnp.zeros(window, shapes.tail.dtype), steps, tokens)


Carry: TypeAlias = tuple[Any, DeltaRecords | None]
"""A model's caches, and the records of a verify step."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """What a memory gets from one layer."""

    window: jax.Array
    """[S, W-1+T, C] convolution inputs: the tail before the call, then its T tokens"""
    inputs: DeltaInputs
    """fields [M, ...]"""


Memory: TypeAlias = Callable[[Carry, Slot, Batch, Window], tuple[Carry, jax.Array]]
"""Returns the outputs f32 [M, H, V] beside what it carries on."""

ChunkRule: TypeAlias = Callable[[jax.Array, DeltaInputs, jax.Array], tuple[jax.Array, jax.Array]]
"""``gdn.chunked_delta_rule`` or ``kda.chunked_delta_rule``."""


def decode_memory(carry: Carry, slot: Slot, batch: Batch, x: Window) -> tuple[Carry, jax.Array]:
    """One token per row; rows that are not live keep their state."""
    caches, records = carry
    inputs = mask_tokens(x.inputs, batch.flat(batch.live))
    # The states of all layers and rows are one list, so that the loop moves them where they are.
    rows = caches.delta.shape[1]
    states = caches.delta.reshape(-1, *caches.delta.shape[2:])
    states, out, _ = recur(states, inputs, slot * rows + batch.query_rows)
    tails = jnp.where(batch.live[..., None], x.window[:, 1:], x.window[:, :-1])
    moved = replace(caches, delta=states.reshape(caches.delta.shape))
    return (moved.put_tails(slot, batch.rows, tails), records), out


def chunk_memory(rule: ChunkRule) -> Memory:
    """A chunk of tokens per sequence, live ones first, by the family's chunk form."""

    def memory(carry: Carry, slot: Slot, batch: Batch, x: Window) -> tuple[Carry, jax.Array]:
        caches, records = carry
        valid = jnp.sum(batch.live, axis=1)
        states = layer_rows(caches.delta, slot, batch.rows)
        states, out = rule(states, jax.tree.map(batch.grid, x.inputs), valid)
        inputs = x.window.shape[1] - batch.shape[1]
        tails = jax.vmap(lambda w, n: jax.lax.dynamic_slice_in_dim(w, n, inputs))(x.window, valid)
        moved = replace(caches, delta=caches.delta.at[slot, batch.state_rows].set(states))
        return (moved.put_tails(slot, batch.rows, tails), records), batch.flat(out)

    return memory


def verify_memory(carry: Carry, slot: Slot, batch: Batch, x: Window) -> tuple[Carry, jax.Array]:
    """Tokens one by one, as decode would feed them; the state stays, the steps are recorded."""
    caches, records = carry
    assert records is not None
    inputs = mask_tokens(x.inputs, batch.flat(batch.live))
    states = layer_rows(caches.delta, slot, batch.rows)
    _, out, steps = recur(states, inputs, batch.owner)
    fresh = DeltaRecords(x.window, steps, records.tokens)
    records = jax.tree.map(lambda old, new: old.at[slot].set(new), records, fresh)
    return (caches, records), out


def commit_records(
    caches: Self, records: DeltaRecords, rows: jax.Array, accepted: jax.Array
) -> Self:
    """Moves the recurrent state of each verified row by its first ``accepted[s]`` tokens.

    What is cached per position needs nothing: that of rejected tokens lies behind the row's
    position, where no query sees it until it is written anew.
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
