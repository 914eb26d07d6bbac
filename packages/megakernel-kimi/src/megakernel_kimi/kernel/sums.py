"""The sum of all experts' partial results, of which a rank needs the shared ones in part only.

Routed experts are wanted as a whole everywhere, shared experts in the columns of one's lane: a
message within the host carries the routed sum and the receiver's columns of the shared one, then
the same lanes of all hosts exchange what they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from kda_mla_kernels.backend import RANKS
from kda_mla_kernels.block import Block
from tpu_collectives import AllToAll, Topology

__all__ = ["ExpertSums"]


@dataclass(frozen=True)
class ExpertSums:
    """Two phases: within the host, then across hosts.

    Terms and sums are rounded to the wire's dtype; sums are f32, in rank order, and equal on all
    ranks that have them.

    Attributes:
        topology: the ranks.
        block: rows of a step.
        routed: columns of routed experts' sums.
        shared: columns of the shared experts' sums on one lane.
        dtype: of the wire.
    """

    topology: Topology
    block: Block
    routed: int
    shared: int
    dtype: Any

    @cached_property
    def _host(self) -> AllToAll:
        return self._exchange("host")

    @cached_property
    def _lane(self) -> AllToAll:
        return self._exchange("lane")

    def _exchange(self, within: Any) -> AllToAll:
        width = self.routed + self.shared
        return AllToAll(self.topology, self.block.rows, width, self.dtype, within, RANKS)

    def scratch(self) -> tuple[Any, Any]:
        """Buffers and semaphores."""
        return self._host.scratch(), self._lane.scratch()

    def __call__(
        self, refs: tuple[Any, Any], routed: jax.Array, shared: jax.Array, use: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Sums over all ranks.

        Args:
            routed: f32 [P, C]. shared: f32 [P, D], of which lane l gets the l-th run of columns.
            use: i32, number of this use of ``refs``.

        Returns:
            f32 [P, C] and [P, shared].
        """
        rows = self.block.rows
        mine, others = routed[:rows].astype(self.dtype), shared[:rows].astype(self.dtype)
        blocks = [jnp.concatenate([mine, part], axis=1) for part in self._parts(others)]
        first = self._summed(self._host, refs[0], jnp.stack(blocks), use)
        copies = jnp.broadcast_to(first[None], (self._lane.members, *first.shape))
        total = self._summed(self._lane, refs[1], copies, use).astype(jnp.float32)
        total = self.block.pad(total)
        return total[:, : self.routed], total[:, self.routed :]

    def _parts(self, shared: jax.Array) -> list[jax.Array]:
        """[rows, shared] of each lane, the last padded."""
        missing = self._host.members * self.shared - shared.shape[1]
        if missing:
            empty = jnp.zeros((len(shared), missing), shared.dtype)
            shared = jnp.concatenate([shared, empty], axis=1)
        return jnp.split(shared, self._host.members, axis=1)

    def _summed(self, exchange: AllToAll, refs: Any, blocks: jax.Array, use: Any) -> jax.Array:
        terms = exchange.finish(exchange.start(refs, blocks, use))
        total = terms[0].astype(jnp.float32)
        for term in range(1, exchange.members):
            total = total + terms[term].astype(jnp.float32)
        return total.astype(self.dtype)
