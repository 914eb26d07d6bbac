"""One dependent exchange inside a kernel: every rank of a group pushes a block to every other.

Each rank has two receive areas with one block per member of the group, and a semaphore for each
area. Use number c of an exchange takes area c mod 2 (its *parity*)::

    receive[parity, sender]       written by `sender`, read by this rank
                    ^ own slot:   written by this rank, and the source of what it pushes

**Why reuse is safe without a handshake.** A rank ends use c only after the blocks of all peers
for c have arrived and it has read them. A peer that starts use c+2 has ended c+1, so it holds this
rank's block of c+1, so this rank had ended c and has read area c mod 2: it may be overwritten.
This needs that every pair exchanges in both directions at every use, that all ranks count uses
alike, and that use c+1 of the same scratch starts only after use c has ended on that rank. The
semaphores follow parity as well: otherwise the bytes of a fast peer for c+1 would satisfy a wait
for c while those of a slow peer are missing. Sources are safe because sends are waited for before
a use ends. Scratch of a collective must live for the whole kernel and alias nothing: a peer may
write into it long before this rank looks at it.

One wait covers the blocks of all peers: DMA semaphores count bytes, and the blocks are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_collectives.levels import Level
from tpu_collectives.wire import Wire

__all__ = ["Exchange", "ExchangeRefs"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["receive", "source", "send_sem", "receive_sems"],
    meta_fields=[],
)
@dataclass(frozen=True)
class ExchangeRefs:
    """What an exchange owns: shapes for ``scratch_shapes`` outside, refs inside the kernel.

    | field | shape | |
    |---|---|---|
    | receive | [2, group, *stored block], VMEM | areas by parity and sender |
    | source | [group, *stored block], VMEM, or None | blocks that differ by receiver |
    | send_sem | DMA | bytes that have left |
    | receive_sems | [2] DMA | bytes that have arrived, by parity |
    """

    receive: Any
    source: Any
    send_sem: Any
    receive_sems: Any


@dataclass(frozen=True)
class Exchange:
    """An all-to-all exchange of equal blocks within the groups of a level.

    Args:
        level: who exchanges; a rank alone keeps its block and waits for nothing.
        wire: size, dtype and layout of a block.
        axis: mesh axis whose index is the rank.
        distinct: every receiver gets another block, instead of the same one.
    """

    level: Level
    wire: Wire
    axis: str
    distinct: bool = False

    def scratch(self) -> ExchangeRefs:
        """Shapes of the areas and semaphores."""
        size, block = self.level.size, self.wire.stored
        source = pltpu.VMEM((size, *block.shape), block.dtype) if self.distinct else None
        return ExchangeRefs(
            receive=pltpu.VMEM((2, size, *block.shape), block.dtype),
            source=source,
            send_sem=pltpu.SemaphoreType.DMA(()),
            receive_sems=pltpu.SemaphoreType.DMA((2,)),
        )

    @property
    def vmem_bytes(self) -> int:
        """VMEM of the areas."""
        return self.wire.bytes * self.level.size * (3 if self.distinct else 2)

    def position(self) -> jax.Array:
        """This rank's number in its group, traced."""
        return self.level.position(lax.axis_index(self.axis))

    def push(self, refs: ExchangeRefs, parity: jax.Array, block: jax.Array) -> None:
        """Round a block to the wire dtype and start sending it to every peer."""
        me = self.position()
        own = refs.receive.at[parity, me]
        own[...] = self.wire.encode(block)
        for peer in self._peers(me):
            self._copy(own, refs, parity, me, peer).start()

    def push_each(self, refs: ExchangeRefs, parity: jax.Array, blocks: Sequence[jax.Array]) -> None:
        """Round one block per position and start sending each to the rank at its position."""
        me = self.position()
        for position, block in enumerate(blocks):
            refs.source[position] = self.wire.encode(block)
        refs.receive[parity, me] = refs.source[me]
        for peer in self._peers(me):
            self._copy(refs.source.at[peer], refs, parity, me, peer).start()

    def wait_received(self, refs: ExchangeRefs, parity: jax.Array) -> None:
        """Wait for the blocks of all peers."""
        self._wait(refs, refs.receive_sems.at[parity])

    def received(self, refs: ExchangeRefs, parity: jax.Array, sender: Any) -> jax.Array:
        """The block of the member at a position, own included, after :meth:`wait_received`."""
        return self.wire.decode(refs.receive[parity, sender])

    def wait_sent(self, refs: ExchangeRefs) -> None:
        """Wait until all blocks have left, so that their sources may be written again."""
        self._wait(refs, refs.send_sem)

    def _peers(self, me: jax.Array) -> list[jax.Array]:
        # Each rank starts at its own neighbour, so that no receiver is everybody's first.
        return [lax.rem(me + offset, self.level.size) for offset in range(1, self.level.size)]

    def _copy(self, source: Any, refs: ExchangeRefs, parity: jax.Array, me: Any, peer: Any) -> Any:
        rank = lax.axis_index(self.axis)
        return pltpu.make_async_remote_copy(
            src_ref=source,
            dst_ref=refs.receive.at[parity, me],
            send_sem=refs.send_sem,
            recv_sem=refs.receive_sems.at[parity],
            device_id={self.axis: self.level.peer(rank, peer)},
        )

    def _wait(self, refs: ExchangeRefs, semaphore: Any) -> None:
        if self.level.size == 1:
            return
        # Only the size of this descriptor counts: one block from, or to, each peer.
        blocks = refs.receive.at[0, pl.ds(0, self.level.size - 1)]
        pltpu.make_async_copy(blocks, blocks, semaphore).wait()
