"""Collectives of one phase in which every member has a block for, or from, every other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from tpu_collectives.chain import Handle, parity_of
from tpu_collectives.checks import check_block, check_payload, padded
from tpu_collectives.errors import CollectiveError
from tpu_collectives.exchange import Exchange, ExchangeRefs
from tpu_collectives.levels import level_of
from tpu_collectives.topology import GroupBy, Topology
from tpu_collectives.wire import Wire

__all__ = ["AllToAll", "PairExchange"]


@dataclass(frozen=True)
class AllToAll:
    """Every member of a group sends each member a [rows, width] block of its own.

    ``start`` takes [members, rows, width], one block per receiver; ``finish`` gives the same shape,
    one block per sender, both in rank order.

    Args:
        topology: the ranks.
        rows: rows of a block.
        width: columns of a block, any number.
        dtype: bfloat16, float32 or int32.
        within: partition whose groups exchange.
        axis: mesh axis whose index is the rank.

    Raises:
        CollectiveError: sizes below 1 or another dtype.
        TopologyError: an unknown partition.
    """

    topology: Topology
    rows: int
    width: int
    dtype: Any = jnp.bfloat16
    within: GroupBy = "all"
    axis: str = "ranks"

    def __post_init__(self) -> None:
        check_block(self.rows, self.width)
        check_payload(self.dtype)
        level_of(self.topology, self.within)

    @property
    def members(self) -> int:
        """Ranks of a group."""
        return self._exchange.level.size

    @property
    def input(self) -> jax.ShapeDtypeStruct:
        """[members, rows, width] of ``dtype``: one block per receiver."""
        return jax.ShapeDtypeStruct((self.members, self.rows, self.width), self.dtype)

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        """[members, rows, width] of ``dtype``: one block per sender."""
        return self.input

    @cached_property
    def _exchange(self) -> Exchange:
        wire = Wire(self.rows, padded(self.rows, self.width, self.dtype), self.dtype)
        return Exchange(level_of(self.topology, self.within), wire, self.axis, distinct=True)

    def scratch(self) -> ExchangeRefs:
        """Buffers and semaphores, for ``scratch_shapes``; they live for the whole kernel."""
        return self._exchange.scratch()

    def start(self, refs: ExchangeRefs, blocks: jax.Array, phase: Any) -> Handle:
        """Send every block; ``phase`` is the number of this use of ``refs``."""
        handle = self.resume(refs, phase)
        parts = [blocks[position] for position in range(self.members)]
        self._exchange.push_each(refs, handle.parity, parts)
        return handle

    def resume(self, refs: ExchangeRefs, phase: Any) -> Handle:
        """The handle of a use that was started in another iteration or branch."""
        return Handle(refs, parity_of(phase))

    def finish(self, handle: Handle) -> jax.Array:
        """Wait for a block from every member and for all sends."""
        refs: ExchangeRefs = handle.refs
        self._exchange.wait_received(refs, handle.parity)
        senders = range(self.members)
        blocks = [self._exchange.received(refs, handle.parity, s) for s in senders]
        self._exchange.wait_sent(refs)
        return jnp.stack([block[:, : self.width].astype(self.dtype) for block in blocks])


@dataclass(frozen=True)
class PairExchange:
    """Two ranks swap [rows, width] blocks: the cores of a chip, or of any other group of two.

    ``finish`` gives the partner's block. A kernel that only swaps within pairs ends with a second
    barrier (see :class:`~tpu_collectives.Barrier`).

    Args:
        topology: the ranks.
        rows: rows of a block.
        width: columns of a block, any number.
        dtype: bfloat16, float32 or int32.
        within: partition into pairs; by default siblings, the cores of a chip.
        axis: mesh axis whose index is the rank.

    Raises:
        CollectiveError: sizes below 1, another dtype, or groups that are not pairs.
        TopologyError: an unknown partition.
    """

    topology: Topology
    rows: int
    width: int
    dtype: Any = jnp.bfloat16
    within: GroupBy = "chip"
    axis: str = "ranks"

    def __post_init__(self) -> None:
        check_block(self.rows, self.width)
        check_payload(self.dtype)
        size = level_of(self.topology, self.within).size
        if size != 2:
            raise CollectiveError(
                f"a {self.within} of {self.topology.name} has {size} ranks, so they are no pairs;"
                " name a partition into twos"
            )

    @property
    def input(self) -> jax.ShapeDtypeStruct:
        """[rows, width] of ``dtype``: the block for the partner."""
        return jax.ShapeDtypeStruct((self.rows, self.width), self.dtype)

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        """[rows, width] of ``dtype``: the partner's block."""
        return self.input

    @cached_property
    def _exchange(self) -> Exchange:
        wire = Wire(self.rows, padded(self.rows, self.width, self.dtype), self.dtype)
        return Exchange(level_of(self.topology, self.within), wire, self.axis)

    def scratch(self) -> ExchangeRefs:
        """Buffers and semaphores, for ``scratch_shapes``; they live for the whole kernel."""
        return self._exchange.scratch()

    def start(self, refs: ExchangeRefs, block: jax.Array, phase: Any) -> Handle:
        """Send the block; ``phase`` is the number of this use of ``refs``."""
        handle = self.resume(refs, phase)
        self._exchange.push(refs, handle.parity, block)
        return handle

    def resume(self, refs: ExchangeRefs, phase: Any) -> Handle:
        """The handle of a use that was started in another iteration or branch."""
        return Handle(refs, parity_of(phase))

    def finish(self, handle: Handle) -> jax.Array:
        """Wait for the partner's block and for the send."""
        refs: ExchangeRefs = handle.refs
        self._exchange.wait_received(refs, handle.parity)
        partner = 1 - self._exchange.position()
        block = self._exchange.received(refs, handle.parity, partner)
        self._exchange.wait_sent(refs)
        return block[:, : self.width].astype(self.dtype)
