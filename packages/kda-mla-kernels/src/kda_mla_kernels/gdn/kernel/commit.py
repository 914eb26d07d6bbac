"""Applies the records of accepted tokens to the state, where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.gdn.kernel.rule import as_columns, move
from kda_mla_kernels.gdn.kernel.shape import GdnMemory, GdnShape

__all__ = ["Replay", "ReplayScratch", "commit_states"]

SLOTS = 3
"""One state is loaded and one is stored while a third is computed."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReplayScratch:
    """Slots of sequences in flight and of layers' records."""

    tails: Any
    """[3, W-1, C] held dtype"""
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

    shape: GdnShape
    block: Block
    held: Any

    def scratch(self) -> ReplayScratch:
        """An entry of ``scratch_shapes``."""
        shape = self.shape
        state = (SLOTS, shape.value_heads, shape.key_dim, shape.value_dim)
        return ReplayScratch(
            tails=pltpu.VMEM((SLOTS, shape.taps - 1, shape.channels), jnp.dtype(self.held)),
            states=pltpu.VMEM(state, jnp.float32),
            records=pltpu.VMEM((2, self.block.padded, shape.record_width), jnp.float32),
            load_sems=pltpu.SemaphoreType.DMA((SLOTS, 2)),
            store_sems=pltpu.SemaphoreType.DMA((SLOTS, 2)),
            record_sems=pltpu.SemaphoreType.DMA((2,)),
        )

    def __call__(
        self, scratch: ReplayScratch, memory: GdnMemory, records: Any, where: Where, accepted: Any
    ) -> None:
        """Moves the states.

        Slot use: turn i waits for its loads, then for the stores of turn i-2, whose slot it fills
        for turn i+1, computes, and starts its own stores. So no slot is loaded before what it
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
                turns.wait_loads(turn)
                pl.when(turn >= 2)(lambda: turns.wait_stores(turn - 2))
                pl.when(turn + 1 < layers * sequences)(lambda: turns.start_loads(turn + 1))

                @pl.loop(0, accepted[s])
                def _(t: jax.Array) -> None:
                    self._token(scratch, turn % SLOTS, layer % 2, s * self.block.tokens + t)

                turns.start_stores(turn)

        for turn in range(max(0, layers * sequences - 2), layers * sequences):
            turns.wait_stores(turn)

    def _load_records(self, scratch: ReplayScratch, records: Any, layer: Any) -> Any:
        slot = layer % 2
        return pltpu.make_async_copy(
            records.at[layer], scratch.records.at[slot], scratch.record_sems.at[slot]
        )

    def _token(self, scratch: ReplayScratch, slot: Any, page: Any, row: Any) -> None:
        """One token's part of a state and tail in VMEM."""
        shape, record, at = self.shape, self.shape.record, pl.ds(row, 1)
        keys = as_columns(scratch.records[page, at, record.key.columns], shape.key_heads)
        updates = scratch.records[page, at, record.update.columns]
        decays = scratch.records[page, at, record.decay.columns]
        for head in range(shape.key_heads):
            square = (shape.key_dim, shape.value_dim)
            key = jnp.broadcast_to(keys[:, head : head + 1], square)
            members = slice(head * shape.group, (head + 1) * shape.group)
            states = scratch.states[slot, members]
            moved: list[jax.Array] = []
            for g in range(shape.group):
                h = head * shape.group + g
                update = updates[:, h * shape.value_dim : (h + 1) * shape.value_dim]
                decay = jnp.broadcast_to(decays[:, h : h + 1], update.shape)
                moved.append(move(states[g], decay, key, update))
            scratch.states[slot, members] = jnp.stack(moved)
        tail = scratch.tails[slot].astype(jnp.float32)
        fresh = scratch.records[page, at, record.inputs.columns]
        line = jnp.concatenate([tail[1:], fresh], axis=0)
        scratch.tails[slot] = line.astype(scratch.tails.dtype)


@dataclass(frozen=True)
class _Turns:
    """Transfers of (layer, sequence) pairs, numbered in order; nothing for those not accepted."""

    replay: Replay
    scratch: ReplayScratch
    memory: GdnMemory
    where: Where
    accepted: Any

    def start_loads(self, turn: Any) -> None:
        self._if_accepted(turn, lambda: [copy.start() for copy in self._copies(turn, False)])

    def wait_loads(self, turn: Any) -> None:
        self._if_accepted(turn, lambda: [copy.wait() for copy in self._copies(turn, False)])

    def start_stores(self, turn: Any) -> None:
        self._if_accepted(turn, lambda: [copy.start() for copy in self._copies(turn, True)])

    def wait_stores(self, turn: Any) -> None:
        self._if_accepted(turn, lambda: [copy.wait() for copy in self._copies(turn, True)])

    def _if_accepted(self, turn: Any, do: Any) -> None:
        @pl.when(self.accepted[turn % self.replay.block.sequences] > 0)
        def _() -> None:
            do()

    def _copies(self, turn: Any, store: bool) -> list[Any]:
        sequences, slot = self.replay.block.sequences, turn % SLOTS
        place = (turn // sequences, self.where.rows[turn % sequences])
        sems = self.scratch.store_sems if store else self.scratch.load_sems
        pairs = [
            (self.memory.tail.at[place], self.scratch.tails.at[slot], sems.at[slot, 0]),
            (self.memory.delta.at[place], self.scratch.states.at[slot], sems.at[slot, 1]),
        ]
        return [
            pltpu.make_async_copy(here, there, sem)
            if store
            else pltpu.make_async_copy(there, here, sem)
            for there, here, sem in pairs
        ]


def commit_states(
    shape: GdnShape,
    block: Block,
    held: Any,
    memory: GdnMemory,
    records: jax.Array,
    where: Where,
    accepted: jax.Array,
    interpret: Any = False,
) -> GdnMemory:
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

    def kernel(
        where: Where, accepted: Any, records: Any, _: GdnMemory, moved: GdnMemory, scratch: Any
    ) -> None:
        replay(scratch, moved, records, where, accepted)

    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.HBM)
    both = GdnMemory(hbm, hbm)
    return pl.pallas_call(
        kernel,
        name=f"gdn_commit_s{block.sequences}_t{block.tokens}_h{shape.value_heads}",
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), memory),
        in_specs=[Where(smem, smem), smem, hbm, both],
        out_specs=both,
        scratch_shapes=[replay.scratch()],
        # Flattened: rows, positions, accepted, records, tail, delta.
        input_output_aliases={4: 0, 5: 1},
        interpret=interpret,
    )(where, accepted, records, memory)


def _check(shape: GdnShape, block: Block, held: Any, memory: GdnMemory, records: jax.Array) -> None:
    layers, rows = memory.delta.shape[:2]
    heads = (shape.value_heads, shape.key_dim, shape.value_dim)
    expected = {
        "tail": (memory.tail, (layers, rows, shape.taps - 1, shape.channels), jnp.dtype(held)),
        "delta": (memory.delta, (layers, rows, *heads), jnp.dtype(jnp.float32)),
        "records": (
            records,
            (layers, block.padded, shape.record_width),
            jnp.dtype(jnp.float32),
        ),
    }
    for name, (array, size, dtype) in expected.items():
        if array.shape != size or array.dtype != dtype:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}, but must be {dtype}{list(size)}"
            )
