"""Broadcast: the block of one rank, on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_collectives.chain import Handle, parity_of
from tpu_collectives.checks import check_block, check_payload, padded
from tpu_collectives.errors import CollectiveError
from tpu_collectives.topology import Topology
from tpu_collectives.wire import Wire

__all__ = ["Broadcast", "BroadcastRefs"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["receive", "send_sem", "receive_sems", "ready_sems"],
    meta_fields=[],
)
@dataclass(frozen=True)
class BroadcastRefs:
    """Areas [2, *stored block] by parity, DMA semaphores, and the root's count of ready ranks."""

    receive: Any
    send_sem: Any
    receive_sems: Any
    ready_sems: Any


@dataclass(frozen=True)
class Broadcast:
    """Broadcast of a [rows, width] block from a fixed root, in one phase.

    The other ranks answer with a signal instead of data: a rank signals the root when it starts
    use c, so it has read use c-1. The root ends use c only when all have signalled c, so when it
    starts c+1 it may write the area of c-1 again. Nobody else runs ahead: use c+1 needs data that
    the root sends after it ended c. Hence two areas are enough, and the root must not change.

    A kernel that only broadcasts ends with a second barrier (see
    :class:`~tpu_collectives.Barrier`).

    Args:
        topology: the ranks.
        rows: rows of the block.
        width: columns of the block, any number.
        dtype: bfloat16, float32 or int32.
        root: rank whose block it is.
        axis: mesh axis whose index is the rank.

    Raises:
        CollectiveError: sizes below 1, another dtype, or a root that is no rank.
    """

    topology: Topology
    rows: int
    width: int
    dtype: Any = jnp.bfloat16
    root: int = 0
    axis: str = "ranks"

    def __post_init__(self) -> None:
        check_block(self.rows, self.width)
        check_payload(self.dtype)
        if not 0 <= self.root < self.topology.ranks:
            raise CollectiveError(
                f"root {self.root} is not a rank of {self.topology.name};"
                f" use 0..{self.topology.ranks - 1}"
            )

    @property
    def input(self) -> jax.ShapeDtypeStruct:
        """[rows, width] of ``dtype``; read on the root only."""
        return jax.ShapeDtypeStruct((self.rows, self.width), self.dtype)

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        """[rows, width] of ``dtype``: the root's block."""
        return self.input

    def scratch(self) -> BroadcastRefs:
        """Buffers and semaphores, for ``scratch_shapes``; they live for the whole kernel."""
        return BroadcastRefs(
            receive=pltpu.VMEM((2, *self._wire.stored.shape), self._wire.stored.dtype),
            send_sem=pltpu.SemaphoreType.DMA(()),
            receive_sems=pltpu.SemaphoreType.DMA((2,)),
            ready_sems=pltpu.SemaphoreType.REGULAR((2,)),
        )

    def start(self, refs: BroadcastRefs, block: jax.Array, phase: Any) -> Handle:
        """Send the block from the root; ``phase`` is the number of this use of ``refs``."""
        handle = self.resume(refs, phase)
        parity, is_root = handle.parity, lax.axis_index(self.axis) == self.root

        @pl.when(is_root)
        def _() -> None:
            refs.receive[parity] = self._wire.encode(block)
            for offset in range(1, self.topology.ranks):
                self._copy(refs, parity, (self.root + offset) % self.topology.ranks).start()

        @pl.when(jnp.logical_not(is_root))
        def _() -> None:
            pl.semaphore_signal(refs.ready_sems.at[parity], 1, device_id={self.axis: self.root})

        return handle

    def resume(self, refs: BroadcastRefs, phase: Any) -> Handle:
        """The handle of a use that was started in another iteration or branch."""
        return Handle(refs, parity_of(phase))

    def finish(self, handle: Handle) -> jax.Array:
        """Wait for the root's block; on the root, for its sends and for all ranks to be ready."""
        refs: BroadcastRefs = handle.refs
        parity, is_root = handle.parity, lax.axis_index(self.axis) == self.root
        others = self.topology.ranks - 1

        @pl.when(is_root)
        def _() -> None:
            for _ in range(others):
                self._copy(refs, parity, self.root).wait_send()
            if others:
                pl.semaphore_wait(refs.ready_sems.at[parity], others)

        @pl.when(jnp.logical_not(is_root))
        def _() -> None:
            self._copy(refs, parity, self.root).wait_recv()

        received = self._wire.decode(refs.receive[parity])
        return received[:, : self.width].astype(self.dtype)

    @property
    def _wire(self) -> Wire:
        return Wire(self.rows, padded(self.rows, self.width, self.dtype), self.dtype)

    def _copy(self, refs: BroadcastRefs, parity: jax.Array, peer: int) -> Any:
        return pltpu.make_async_remote_copy(
            src_ref=refs.receive.at[parity],
            dst_ref=refs.receive.at[parity],
            send_sem=refs.send_sem,
            recv_sem=refs.receive_sems.at[parity],
            device_id={self.axis: peer},
        )
