"""Products whose columns the ranks of a host compute together.

Every host computes all of them, so gathering never leaves it; each rank reads a share of the
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from kda_mla_kernels.backend.ranks import RANKS
from kda_mla_kernels.block import Block
from tpu_collectives import AllGather, GroupBy, Topology
from vmem_pool.tiling import LANES

__all__ = ["LaneGather"]


@dataclass(frozen=True)
class LaneGather:
    """Gathers a block of columns of each rank of a group, by default those of a host; several parts
    may share a message.

    Attributes:
        topology: the ranks.
        block: rows of a step.
        parts: columns that a rank has of each part.
        dtype: what travels; nothing is rounded but to it.
        within: partitions to gather within, innermost first.
    """

    topology: Topology
    block: Block
    parts: tuple[int, ...]
    dtype: Any
    within: tuple[GroupBy, ...] = ("host",)

    @cached_property
    def _gather(self) -> AllGather:
        width = -(-sum(self.parts) // LANES) * LANES
        rows = self.block.rows
        return AllGather(self.topology, rows, width, self.dtype, within=self.within, axis=RANKS)

    def scratch(self) -> Any:
        """Buffers and semaphores."""
        return self._gather.scratch()

    def start(self, refs: Any, columns: jax.Array, use: Any) -> Any:
        """Sends this rank's columns.

        Args:
            columns: [P, sum of parts].
            use: i32, number of this use of ``refs``.
        """
        sent = columns[: self.block.rows].astype(self.dtype)
        missing = self._gather.width - sent.shape[1]
        if missing:
            sent = jnp.concatenate([sent, jnp.zeros((len(sent), missing), self.dtype)], axis=1)
        return self._gather.start(refs, sent, use)

    def resume(self, refs: Any, use: Any) -> Any:
        """The handle of a use that was started in another branch."""
        return self._gather.resume(refs, use)

    def finish(self, handle: Any, wholes: tuple[int, ...]) -> list[jax.Array]:
        """Waits for the columns of all.

        Args:
            wholes: columns of each part as a whole; what the members have beyond is padding.

        Returns:
            [P, whole] of every part.
        """
        found = self.block.pad(self._gather.finish(handle))
        return [self._joined(found, part, whole) for part, whole in enumerate(wholes)]

    def _joined(self, found: jax.Array, part: int, whole: int) -> jax.Array:
        stride, size = self._gather.width, self.parts[part]
        first = sum(self.parts[:part])
        starts = [member * stride + first for member in range(found.shape[1] // stride)]
        pieces = [found[:, start : start + size] for start in starts]
        return jnp.concatenate(pieces, axis=1)[:, :whole]
