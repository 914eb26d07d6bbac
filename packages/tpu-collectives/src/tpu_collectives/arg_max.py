"""Arg-max over all ranks: the largest value and its index, on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from tpu_collectives.chain import Chain, ChainRefs, Handle, parity_of
from tpu_collectives.checks import check_block
from tpu_collectives.errors import CollectiveError
from tpu_collectives.levels import Tree, tree_levels
from tpu_collectives.steps import Kind, Step
from tpu_collectives.topology import Topology
from tpu_collectives.wire import LANES

__all__ = ["ArgMax"]

MAX_CANDIDATES = 1 << 24
"""Indices travel as f32, which holds integers up to here; as bit patterns they were denormals."""


@dataclass(frozen=True)
class ArgMax:
    """Per row, the largest of the ranks' values and its index; equal on all ranks.

    Every rank brings its own best pair, e.g. of its shard of the vocabulary. Among equal values the
    lowest index wins, so the result is that of an arg-max over all shards. A NaN counts as minus
    infinity. Comparing is exact, so the tree only changes messages, never the result.

    Args:
        topology: the ranks.
        rows: rows.
        candidates: indices are below this; at most 2^24.
        tree: partitions to compare within, innermost first; by default all ranks at once.
        axis: mesh axis whose index is the rank.

    Raises:
        CollectiveError: sizes below 1, more than 2^24 candidates, or a tree that does not connect
            all ranks once.
    """

    topology: Topology
    rows: int
    candidates: int
    tree: Tree = ("all",)
    axis: str = "ranks"

    def __post_init__(self) -> None:
        check_block(self.rows, self.candidates)
        if self.candidates > MAX_CANDIDATES:
            raise CollectiveError(
                f"{self.candidates} candidates are more than {MAX_CANDIDATES}, the indices that"
                " f32 holds; reduce the shards of several ranks first"
            )
        tree_levels(self.topology, self.tree)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The phases, in order."""
        levels = tree_levels(self.topology, self.tree)
        return tuple(Step(Kind.REDUCE, level, 2 * LANES) for level in levels)

    @cached_property
    def _chain(self) -> Chain:
        return Chain(self.steps, self.rows, jnp.float32, self.axis, combine=best_of)

    def scratch(self) -> ChainRefs:
        """Buffers and semaphores, for ``scratch_shapes``; they live for the whole kernel."""
        return self._chain.scratch()

    def start(self, refs: ChainRefs, values: jax.Array, indices: jax.Array, phase: Any) -> Handle:
        """Send this rank's best pair of every row.

        Args:
            refs: what the kernel got for :meth:`scratch`.
            values: [rows, 1] f32.
            indices: [rows, 1] int32.
            phase: number of this use of ``refs``: 0, 1, 2, ... on all ranks alike.
        """
        handle = self.resume(refs, phase)
        values = jnp.where(jnp.isnan(values), -jnp.inf, values)
        half = (self.rows, LANES)
        pair = [jnp.broadcast_to(x.astype(jnp.float32), half) for x in (values, indices)]
        self._chain.send(handle, jnp.concatenate(pair, axis=1))
        return handle

    def resume(self, refs: ChainRefs, phase: Any) -> Handle:
        """The handle of a use that was started in another iteration or branch."""
        return Handle(refs, parity_of(phase))

    def advance(self, handle: Handle) -> Handle:
        """Wait for the phase in flight and send the next, unless it is the last."""
        return self._chain.advance(handle)

    def finish(self, handle: Handle) -> tuple[jax.Array, jax.Array]:
        """The best values, [rows, 1] f32, and their indices, [rows, 1] int32."""
        pair = self._chain.finish(handle)
        return pair[:, :1], pair[:, LANES : LANES + 1].astype(jnp.int32)


def best_of(blocks: list[jax.Array]) -> jax.Array:
    """Of [rows, 256] blocks, values in the first half and indices in the second, the best pairs."""
    value, index = blocks[0][:, :LANES], blocks[0][:, LANES:]
    for block in blocks[1:]:
        other, at = block[:, :LANES], block[:, LANES:]
        better = (other > value) | ((other == value) & (at < index))
        value, index = jnp.where(better, other, value), jnp.where(better, at, index)
    return jnp.concatenate([value, index], axis=1)
