"""What surrounds latent attention where the positions of a row are dealt out to ranks.

Each of them attends with the heads of all: queries are gathered first; then every rank sends what
it found in its positions to the rank whose heads these are, which merges.

Letters: M rows, P padded rows, H heads of a rank, G ranks that hold positions of the same row, C
latent width, D shared key dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from kda_mla_kernels.backend import RANKS
from kda_mla_kernels.block import Block
from kda_mla_kernels.mla import MlaShape
from kda_mla_kernels.mla.kernel import PARTIAL_LANES, merge_packed
from kda_mla_kernels.numerics import Numerics
from tpu_collectives import AllToAll, GroupBy, Topology

from megakernel_kimi.kernel.lanes import LaneGather

__all__ = ["PositionExchange"]


@dataclass(frozen=True)
class PositionExchange:
    """Gathers queries before, and exchanges results after, attention over a rank's positions.

    Attributes:
        topology: the ranks.
        block: rows of a step.
        shape: widths of latent attention.
        heads: H.
        within: ``host`` or ``all``, the ranks that a row's positions are dealt out to.
        numerics: policy of queries and of merged results; between ranks, results are f32.
    """

    topology: Topology
    block: Block
    shape: MlaShape
    heads: int
    within: GroupBy
    numerics: Numerics

    @property
    def members(self) -> int:
        """G."""
        return self._exchange.members

    @cached_property
    def _queries(self) -> LaneGather:
        parts = self.heads * self.shape.latent, self.heads * self.shape.shared_dim
        tree: tuple[GroupBy, ...] = ("host",) if self.within == "host" else ("host", "lane")
        return LaneGather(self.topology, self.block, parts, self.numerics.activation, tree)

    @cached_property
    def _exchange(self) -> AllToAll:
        width = self.heads * self._packed
        return AllToAll(self.topology, self.block.rows, width, jnp.float32, self.within, RANKS)

    @property
    def _packed(self) -> int:
        """Columns of what one head found."""
        return self.shape.latent + PARTIAL_LANES

    @property
    def result_bytes(self) -> int:
        """Bytes of what all heads of a step found."""
        return self.members * self.block.rows * self._exchange.width * 4

    def scratch(self) -> tuple[Any, Any]:
        """Buffers and semaphores."""
        return self._queries.scratch(), self._exchange.scratch()

    def gather(
        self, refs: tuple[Any, Any], latent: list[jax.Array], shared: list[jax.Array], use: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Queries of all heads.

        Args:
            latent: [P, C] of each head of this rank, activation dtype. shared: [P, D].
            use: i32, number of this use of ``refs``.

        Returns:
            [P, G·H, C] and [P, G·H, D] in the activation dtype, heads in the order of ranks.
        """
        handle = self._queries.start(refs[0], jnp.concatenate([*latent, *shared], axis=1), use)
        wholes = tuple(self.members * part for part in self._queries.parts)
        parts = self._queries.finish(handle, wholes)
        latents, rest = (jnp.split(part, self.members * self.heads, axis=1) for part in parts)
        return jnp.stack(latents, axis=1), jnp.stack(rest, axis=1)

    def merge(self, refs: tuple[Any, Any], found: jax.Array, use: Any) -> list[jax.Array]:
        """Mixed latents [P, C] of each head of this rank over all positions, rounded once to the
        activation dtype.

        Args:
            found: f32 [P, G·H, C + 128], what all heads found in this rank's positions.
        """
        rows = found[: self.block.rows]
        heads = [rows[:, head] for head in range(self.members * self.heads)]
        blocks = [
            jnp.concatenate(heads[first : first + self.heads], axis=1)
            for first in range(0, len(heads), self.heads)
        ]
        terms = self._exchange.finish(self._exchange.start(refs[1], jnp.stack(blocks), use))
        parts = [jnp.split(term, self.heads, axis=1) for term in terms]
        return [self.block.pad(merge_packed(of_head, self.numerics)) for of_head in zip(*parts)]
