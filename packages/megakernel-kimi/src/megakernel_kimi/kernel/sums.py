"""The sum of all experts' partial results, of which a rank needs the shared ones in part only.

Routed experts are wanted as a whole everywhere, shared experts in the columns of one's lane: a
message within the host carries the routed sum and the receiver's columns of the shared one, then
the same lanes of all hosts exchange what they have (:class:`ExpertSums`). Shared experts are done
first, so their sum may wait for the other (:class:`Together`) or travel alone (:class:`Apart`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from kda_mla_kernels.backend import RANKS
from kda_mla_kernels.block import Block
from tpu_collectives import AllReduce, AllToAll, Topology

__all__ = ["Apart", "ExpertSums", "Together", "Underway"]


@dataclass(frozen=True)
class Underway:
    """A sum that travels."""

    refs: tuple[Any, Any]
    use: Any
    handle: Any
    """of the phase that was started last"""


@dataclass(frozen=True)
class ExpertSums:
    """Two phases: within the host, then across hosts.

    Terms and sums are rounded to the wire's dtype; sums are f32, in rank order, and equal on all
    ranks that have them.

    Attributes:
        topology: the ranks.
        block: rows of a step.
        routed: columns of routed experts' sums; 0 if they travel elsewhere.
        shared: columns of the shared experts' sums on one lane.
        wire_dtype: what travels.
    """

    topology: Topology
    block: Block
    routed: int
    shared: int
    wire_dtype: Any

    @cached_property
    def _host(self) -> AllToAll:
        return self._exchange("host")

    @cached_property
    def _lane(self) -> AllToAll:
        return self._exchange("lane")

    def _exchange(self, within: Any) -> AllToAll:
        width = self.routed + self.shared
        return AllToAll(self.topology, self.block.rows, width, self.wire_dtype, within, RANKS)

    def scratch(self) -> tuple[Any, Any]:
        """Buffers and semaphores."""
        return self._host.scratch(), self._lane.scratch()

    def start(
        self, refs: tuple[Any, Any], routed: jax.Array | None, shared: jax.Array, use: Any
    ) -> Underway:
        """Sends this rank's part within the host.

        Args:
            routed: f32 [P, C], or None if it has no columns here.
            shared: f32 [P, D], of which lane l gets the l-th run of columns.
            use: i32, number of this use of ``refs``.
        """
        whole = [] if routed is None else [self._sent(routed)]
        parts = self._parts(self._sent(shared))
        stacked = jnp.stack([jnp.concatenate([*whole, part], axis=1) for part in parts])
        return Underway(refs, use, self._host.start(refs[0], stacked, use))

    def advance(self, sums: Underway) -> Underway:
        """Waits for the host's parts and sends their sum to the other hosts."""
        first = self._summed(self._host, sums.handle)
        copies = jnp.broadcast_to(first[None], (self._lane.members, *first.shape))
        return Underway(sums.refs, sums.use, self._lane.start(sums.refs[1], copies, sums.use))

    def finish(self, sums: Underway) -> tuple[jax.Array, jax.Array]:
        """f32 [P, routed] and [P, shared] of all ranks, of a sum that was advanced."""
        total = self.block.pad(self._summed(self._lane, sums.handle).astype(jnp.float32))
        return total[:, : self.routed], total[:, self.routed :]

    def _sent(self, part: jax.Array) -> jax.Array:
        return part[: self.block.rows].astype(self.wire_dtype)

    def _parts(self, shared: jax.Array) -> list[jax.Array]:
        """[rows, shared] of each lane, the last padded."""
        missing = self._host.members * self.shared - shared.shape[1]
        if missing:
            empty = jnp.zeros((len(shared), missing), shared.dtype)
            shared = jnp.concatenate([shared, empty], axis=1)
        return list(jnp.split(shared, self._host.members, axis=1))

    def _summed(self, exchange: AllToAll, handle: Any) -> jax.Array:
        terms = exchange.finish(handle)
        total = terms[0].astype(jnp.float32)
        for term in range(1, exchange.members):
            total = total + terms[term].astype(jnp.float32)
        return total.astype(self.wire_dtype)


@dataclass(frozen=True)
class Together:
    """Both sums in the same messages, which leave when routed experts are done."""

    both: ExpertSums

    def scratch(self) -> Any:
        """Buffers and semaphores."""
        return self.both.scratch()

    def start(self, refs: Any, shared: Any, use: Any) -> Any:
        """Takes note of shared experts, before the routed ones are begun.

        Args:
            shared: f32 reference [P, D], this rank's part; unchanged until :meth:`finish`.
            use: i32, number of this use of ``refs``.
        """
        return refs, shared, use

    def advance(self, started: Any) -> Any:
        """Goes on with what travels already, before the products of routed experts."""
        return started

    def finish(self, started: Any, routed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Routed experts of all ranks [P, C], and this lane's columns of shared ones, both f32.

        Args:
            routed: f32 [P, C], this rank's part.
        """
        refs, shared, use = started
        sums = self.both.start(refs, routed, shared[...], use)
        return self.both.finish(self.both.advance(sums))


@dataclass(frozen=True)
class Apart:
    """As :class:`Together`, but the sum of shared experts travels while the routed ones are worked
    on, in messages of its own. The sum of routed experts is scattered and gathered where its
    messages are long; its bits do not depend on that."""

    routed: AllReduce
    shared: ExpertSums

    def scratch(self) -> Any:
        """Buffers and semaphores."""
        return self.routed.scratch(), self.shared.scratch()

    def start(self, refs: Any, shared: Any, use: Any) -> Any:
        """See :meth:`Together.start`."""
        return refs[0], self.shared.start(refs[1], None, shared[...], use)

    def advance(self, started: Any) -> Any:
        """See :meth:`Together.advance`."""
        refs, shared = started
        return refs, self.shared.advance(shared)

    def finish(self, started: Any, routed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See :meth:`Together.finish`."""
        refs, shared = started
        block = self.shared.block
        handle = self.routed.start(refs, routed[: block.rows], shared.use)
        total = self.routed.finish(handle)
        return block.pad(total), self.shared.finish(shared)[1]
