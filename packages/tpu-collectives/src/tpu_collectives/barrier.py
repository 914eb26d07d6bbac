"""The barrier that a communicating kernel needs before its first remote write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_collectives.topology import Topology

__all__ = ["Barrier"]


@dataclass(frozen=True)
class Barrier:
    """Every rank waits until every rank has arrived, in one phase of n - 1 signals.

    No rank may write into a peer that does not run the kernel yet. Signal at kernel entry and wait
    just before the first remote send: loads and the first products hide the skew. The kernel's
    compiler parameters need a ``collective_id``; :meth:`compiler_params` makes them.

    **Successive calls.** A fast rank may leave, enter the next call and signal again while a slow
    rank still waits. That is harmless if nobody can finish before everybody passed the barrier,
    which holds when a collective over *all* ranks follows it (all-reduce, all-gather,
    reduce-scatter, all-to-all, arg-max). A kernel that only exchanges within hosts or pairs, or
    only broadcasts, ends with a second ``signal`` and ``wait``.

    Args:
        topology: the ranks.
        axis: mesh axis whose index is the rank.
    """

    topology: Topology
    axis: str = "ranks"

    def signal(self) -> None:
        """Tell every peer that this rank has arrived."""
        if self.topology.ranks == 1:
            return
        semaphore = pltpu.get_barrier_semaphore()
        rank = lax.axis_index(self.axis)
        for offset in range(1, self.topology.ranks):
            peer = lax.rem(rank + offset, self.topology.ranks)
            pl.semaphore_signal(semaphore, 1, device_id={self.axis: peer})

    def wait(self) -> None:
        """Wait until every peer has arrived."""
        if self.topology.ranks > 1:
            pl.semaphore_wait(pltpu.get_barrier_semaphore(), self.topology.ranks - 1)

    def compiler_params(self, collective_id: int, checks: bool = True, **others: Any) -> Any:
        """``pltpu.CompilerParams`` for a kernel that uses this barrier.

        Args:
            collective_id: number of the barrier semaphore; kernels that may be in flight at once
                need different ones.
            checks: bounds of DMAs, and semaphores that are not zero at the end. Off saves about 20
                cycles per local DMA and 7 per semaphore.
            others: passed on, e.g. ``vmem_limit_bytes``.
        """
        return pltpu.CompilerParams(
            # A kernel that asks for no barrier semaphore must not name one.
            collective_id=collective_id if self.topology.ranks > 1 else None,
            has_side_effects=True,
            disable_bounds_checks=not checks,
            disable_semaphore_checks=not checks,
            **others,
        )
