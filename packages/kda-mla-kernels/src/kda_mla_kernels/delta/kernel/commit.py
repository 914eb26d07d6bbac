"""Applies the records of accepted tokens to the state, where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.commit import Accepted, check_arrays, commit_in_place
from kda_mla_kernels.delta.kernel.rule import as_columns, decayed_states, move, split_heads
from kda_mla_kernels.delta.kernel.shape import DeltaMemory, DeltaShape

__all__ = ["Replay", "ReplayScratch", "commit_states"]

SLOTS = 3
"""One state is loaded and one is stored while a third is computed."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReplayScratch:
    """Slots of sequences in flight and of layers' records."""

    tails: Any
    """[3, tail rows, C] held dtype"""
    states: Any
    """f32 [3, Hv, K, V]"""
    records: Any
    """f32 [2, P, record width]: layer l in slot l mod 2"""
    load_sems: Any
    """[3, 2]: tail, state"""
    store_sems: Any
    """[3, 2]: tail, state"""
    record_sems: Any


@dataclass(frozen=True)
class Replay:
    """The body of a commit: for every layer and sequence, the first accepted tokens in order.

    A sequence of which no token is accepted is neither read nor written. Sequences of one block
    must have different rows: the state of one loads while another's is stored.

    Attributes:
        shape: heads and widths.
        block: sequences and tokens of the stage that wrote the records.
        held: dtype of the tails.
    """

    shape: DeltaShape
    block: Block
    held: Any

    def scratch(self) -> ReplayScratch:
        """An entry of ``scratch_shapes``."""
        shape = self.shape
        state = (SLOTS, shape.value_heads, shape.key_dim, shape.value_dim)
        return ReplayScratch(
            tails=pltpu.VMEM((SLOTS, shape.tail_rows, shape.channels), jnp.dtype(self.held)),
            states=pltpu.VMEM(state, jnp.float32),
            records=pltpu.VMEM((2, self.block.padded, shape.record_width), jnp.float32),
            load_sems=pltpu.SemaphoreType.DMA((SLOTS, 2)),
            store_sems=pltpu.SemaphoreType.DMA((SLOTS, 2)),
            record_sems=pltpu.SemaphoreType.DMA((2,)),
        )

    def __call__(
        self, scratch: ReplayScratch, memory: DeltaMemory, records: Any, where: Where, accepted: Any
    ) -> None:
        """Moves the states.

        Slot use: turn i waits for the stores of turn i-2, fills that slot for turn i+1, waits for
        its own loads, computes, and starts its stores. So no slot is loaded before what it
        holds has left, and at the end the stores of the last two turns are under way.

        Args:
            memory: HBM, changed in place.
            records: HBM f32 [Nl, P, record width].
            accepted: SMEM i32 [S], 0..T tokens of each sequence.
        """
        layers, sequences = memory.delta.shape[0], self.block.sequences
        turns = _Turns(self, scratch, memory, where, accepted)
        self._load_records(scratch, records, 0).start()
        turns.start_loads(0)

        @pl.loop(0, layers)
        def _(layer: jax.Array) -> None:
            self._load_records(scratch, records, layer).wait()

            @pl.when(layer + 1 < layers)
            def _() -> None:
                self._load_records(scratch, records, layer + 1).start()

            @pl.loop(0, sequences)
            def _(s: jax.Array) -> None:
                turn = layer * sequences + s
                pl.when(turn >= 2)(lambda: turns.wait_stores(turn - 2))
                pl.when(turn + 1 < layers * sequences)(lambda: turns.start_loads(turn + 1))

                @pl.when(accepted[s] > 0)
                def _() -> None:
                    turns.wait_loads(turn)

                    @pl.loop(0, accepted[s])
                    def _(t: jax.Array) -> None:
                        self._token(
                            scratch,
                            lax.rem(turn, SLOTS),
                            lax.rem(layer, 2),
                            s * self.block.tokens + t,
                        )

                    turns.start_stores(turn)

        for turn in range(max(0, layers * sequences - 2), layers * sequences):
            turns.wait_stores(turn)

    def _load_records(self, scratch: ReplayScratch, records: Any, layer: Any) -> Any:
        slot = lax.rem(layer, 2)
        return pltpu.make_async_copy(
            records.at[layer], scratch.records.at[slot], scratch.record_sems.at[slot]
        )

    def _token(self, scratch: ReplayScratch, slot: Any, page: Any, row: Any) -> None:
        """One token's part of a state and tail in VMEM."""
        shape, record = self.shape, self.shape.record
        token = scratch.records[page, pl.ds(row, 1)]
        keys = as_columns(token[:, record.key.columns], shape.key_heads)
        updates = token[:, record.update.columns]
        factors = shape.decay_factors(shape.spread_decays(token[:, record.decay.columns]))
        for head in range(shape.key_heads):
            key = jnp.broadcast_to(keys[:, head : head + 1], (shape.key_dim, shape.value_dim))
            members, lanes = shape.readers(head)
            states = scratch.states.at[slot, members]
            states[...] = decayed_states(states[...], factors[members])
            parts = zip(states[...], split_heads(updates[:, lanes], shape.group), strict=True)
            states[...] = jnp.stack([move(decayed, key, update) for decayed, update in parts])
        tail = scratch.tails.at[slot, : shape.taps - 1]
        inputs = [tail[...].astype(jnp.float32), token[:, record.inputs.columns]]
        tail[...] = jnp.concatenate(inputs, axis=0)[1:].astype(tail.dtype)


@dataclass(frozen=True)
class _Turns:
    """Transfers of (layer, sequence) pairs, numbered in order; nothing for those not accepted."""

    replay: Replay
    scratch: ReplayScratch
    memory: DeltaMemory
    where: Where
    accepted: Any

    def start_loads(self, turn: Any) -> None:
        pl.when(self._moves(turn))(lambda: _each(self._copies(turn, store=False), "start"))

    def wait_loads(self, turn: Any) -> None:
        """Only of a turn that moves its state, as :meth:`start_stores`."""
        _each(self._copies(turn, store=False), "wait")

    def start_stores(self, turn: Any) -> None:
        _each(self._copies(turn, store=True), "start")

    def wait_stores(self, turn: Any) -> None:
        pl.when(self._moves(turn))(lambda: _each(self._copies(turn, store=True), "wait"))

    def _moves(self, turn: Any) -> jax.Array:
        return self.accepted[lax.rem(turn, self.replay.block.sequences)] > 0

    def _copies(self, turn: Any, store: bool) -> list[Any]:
        sequences, slot = self.replay.block.sequences, lax.rem(turn, SLOTS)
        place = (lax.div(turn, sequences), self.where.rows[lax.rem(turn, sequences)])
        sems = self.scratch.store_sems if store else self.scratch.load_sems
        pairs = [
            (self.memory.tail.at[place], self.scratch.tails.at[slot], sems.at[slot, 0]),
            (self.memory.delta.at[place], self.scratch.states.at[slot], sems.at[slot, 1]),
        ]
        if store:
            pairs = [(vmem, hbm, sem) for hbm, vmem, sem in pairs]
        return [pltpu.make_async_copy(*pair) for pair in pairs]


def _each(copies: list[Any], action: str) -> None:
    for copy in copies:
        getattr(copy, action)()


def commit_states(
    shape: DeltaShape,
    block: Block,
    held: Any,
    memory: DeltaMemory,
    records: jax.Array,
    where: Where,
    accepted: jax.Array,
    interpret: Any = False,
) -> DeltaMemory:
    """One kernel that commits all layers; donate ``memory`` and it is changed in place.

    Args:
        shape, block, held: see :class:`Replay`.
        memory: arrays; rows of sequences without accepted tokens keep their bits.
        records: f32 [Nl, P, record width] of the stage.
        where: arrays i32 [S]; rows must differ.
        accepted: i32 [S], 0..T.
        interpret: as in ``pallas_call``.

    Returns:
        the memory after the accepted tokens.

    Raises:
        ValueError: memory or records of other shapes or types.
    """
    _check(shape, block, held, memory, records)
    replay = Replay(shape, block, held)
    return commit_in_place(
        f"{shape.kind}_commit_s{block.sequences}_t{block.tokens}_h{shape.value_heads}",
        replay,
        replay.scratch(),
        memory,
        Accepted(where, accepted, records),
        interpret=interpret,
    )


def _check(
    shape: DeltaShape, block: Block, held: Any, memory: DeltaMemory, records: jax.Array
) -> None:
    layers, rows = memory.delta.shape[:2]
    heads = (shape.value_heads, shape.key_dim, shape.value_dim)
    expected: dict[str, tuple[jax.Array, tuple[int, ...], Any]] = {
        "tail": (memory.tail, (layers, rows, shape.tail_rows, shape.channels), jnp.dtype(held)),
        "delta": (memory.delta, (layers, rows, *heads), jnp.dtype(jnp.float32)),
        "records": (
            records,
            (layers, block.padded, shape.record_width),
            jnp.dtype(jnp.float32),
        ),
    }
    check_arrays(expected)
