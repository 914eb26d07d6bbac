"""Collectives of one phase in which every member has a block for, or from, every other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

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
class _OnePhase:
    """Fields, checks and buffers that the collectives of this file have in common."""

    topology: Topology
    rows: int
    width: int
    dtype: Any = jnp.bfloat16
    within: GroupBy = "all"
    axis: str = "ranks"

    _distinct: ClassVar[bool] = False
    """Whether a member sends each other member a block of its own."""

    def __post_init__(self) -> None:
        check_block(self.rows, self.width)
        check_payload(self.dtype)
        level_of(self.topology, self.within)

    @cached_property
    def _exchange(self) -> Exchange:
        wire = Wire(self.rows, padded(self.rows, self.width, self.dtype), self.dtype)
        level = level_of(self.topology, self.within)
        return Exchange(level, wire, self.axis, distinct=self._distinct)

    def scratch(self) -> ExchangeRefs:
        """Buffers and semaphores, for ``scratch_shapes``; they live for the whole kernel."""
        return self._exchange.scratch()

    def resume(self, refs: ExchangeRefs, phase: Any) -> Handle:
        """The handle of a use that was started in another iteration or branch."""
        return Handle(refs, parity_of(phase))

    def _unpadded(self, block: jax.Array) -> jax.Array:
        """[rows, width] of ``dtype`` from a block as it travels."""
        return block[:, : self.width].astype(self.dtype)


@dataclass(frozen=True)
class AllToAll(_OnePhase):
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

    _distinct: ClassVar[bool] = True

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

    def start(self, refs: ExchangeRefs, blocks: jax.Array, phase: Any) -> Handle:
        """Send every block; ``phase`` is the number of this use of ``refs``."""
        handle = self.resume(refs, phase)
        parts = [blocks[position] for position in range(self.members)]
        self._exchange.push_each(refs, handle.parity, parts)
        return handle

    def finish(self, handle: Handle) -> jax.Array:
        """Wait for a block from every member and for all sends."""
        refs: ExchangeRefs = handle.refs
        self._exchange.wait_received(refs, handle.parity)
        senders = range(self.members)
        blocks = [self._exchange.received(refs, handle.parity, s) for s in senders]
        self._exchange.wait_sent(refs)
        return jnp.stack([self._unpadded(block) for block in blocks])


@dataclass(frozen=True)
class PairExchange(_OnePhase):
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

    within: GroupBy = "chip"

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def start(self, refs: ExchangeRefs, block: jax.Array, phase: Any) -> Handle:
        """Send the block; ``phase`` is the number of this use of ``refs``."""
        handle = self.resume(refs, phase)
        self._exchange.push(refs, handle.parity, block)
        return handle

    def finish(self, handle: Handle) -> jax.Array:
        """Wait for the partner's block and for the send."""
        refs: ExchangeRefs = handle.refs
        self._exchange.wait_received(refs, handle.parity)
        partner = 1 - self._exchange.position()
        block = self._exchange.received(refs, handle.parity, partner)
        self._exchange.wait_sent(refs)
        return self._unpadded(block)
