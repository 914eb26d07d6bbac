"""The sum over all ranks, on every rank, with the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from tpu_collectives.chain import Chain, Chained
from tpu_collectives.checks import check_block, check_wire
from tpu_collectives.cost import schedule_us
from tpu_collectives.errors import CollectiveError
from tpu_collectives.levels import Tree, default_tree, tree_levels
from tpu_collectives.steps import Step, all_reduce_steps, phases
from tpu_collectives.table import ScheduleTable, modelled_scatter
from tpu_collectives.topology import Topology
from tpu_collectives.wire import lane_unit

__all__ = ["AllReduce"]


@dataclass(frozen=True)
class AllReduce(Chained):
    """All-reduce of [rows, width] partial sums in the middle of a kernel.

    ::

        comm = AllReduce(topology, rows=8, width=7168)
        pl.pallas_call(kernel, scratch_shapes=[comm.scratch(), ...], ...)

        # in the kernel; `phase` counts the uses of these refs: 0, 1, 2, ... on all ranks alike
        handle = comm.start(refs, partial, phase)     # returns at once
        ...                                           # work that does not need the sum
        total = comm.finish(handle)                   # [rows, width] f32

    The kernel waits at a :class:`~tpu_collectives.Barrier` before the first ``start``. A use ends
    (``finish``) before the next use of the same refs starts. If ``finish`` is in another iteration
    of a loop than ``start``, make its handle with ``resume(refs, phase)``. Where the schedule has
    several phases, ``advance(handle)`` between two pieces of work moves it on.

    **Numerics.** Terms, the sums after every level of the tree and the result are rounded to
    ``wire_dtype``; sums are f32, in rank order. The bits depend on the tree only: not on the
    schedule, the number of rows or the other rows, and they are equal on all ranks.
    :func:`tpu_collectives.reference.all_reduce` computes the same bits.

    Args:
        topology: the ranks.
        rows: rows of a partial, any number.
        width: columns of a partial, any number; padded inside to a multiple of 128 per block.
        wire_dtype: bfloat16 or float32.
        tree: partitions to sum within, innermost first; by default the host, then across hosts.
        schedule: levels to scatter (see :mod:`tpu_collectives.steps`) or a table to choose from;
            by default the cheapest by the cost model.
        axis: mesh axis whose index is the rank.

    Raises:
        CollectiveError: sizes below 1, another wire dtype, a tree that does not connect all ranks
            once, or more levels scattered than there are.
    """

    topology: Topology
    rows: int
    width: int
    wire_dtype: Any = jnp.bfloat16
    tree: Tree | None = None
    schedule: int | ScheduleTable | None = None
    axis: str = "ranks"

    def __post_init__(self) -> None:
        check_block(self.rows, self.width)
        check_wire(self.wire_dtype)
        levels = tree_levels(self.topology, self.summed)
        if isinstance(self.schedule, int) and not 0 <= self.schedule <= len(levels):
            raise CollectiveError(
                f"schedule {self.schedule} scatters more levels than the {len(levels)} of"
                f" {self.summed} on {self.topology.name}; use 0..{len(levels)}"
            )

    @property
    def summed(self) -> Tree:
        """The tree in use."""
        return default_tree(self.topology) if self.tree is None else self.tree

    @cached_property
    def scatter(self) -> int:
        """How many levels of the tree are scattered."""
        if isinstance(self.schedule, int):
            return self.schedule
        size = (self.rows, self.width, self.wire_dtype)
        if self.schedule is not None:
            found = self.schedule.lookup(self.topology, self.summed, *size)
            if found is not None:
                return found
        return modelled_scatter(tree_levels(self.topology, self.summed), *size)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The phases, in order."""
        levels = tree_levels(self.topology, self.summed)
        unit = lane_unit(self.rows, self.wire_dtype)
        return all_reduce_steps(levels, self.scatter, self.width, unit)

    @property
    def modelled_us(self) -> float:
        """Time of the phases by the cost model, in microseconds; not a measurement."""
        return schedule_us(phases(self.steps, self.rows, self.wire_dtype))

    @property
    def input(self) -> jax.ShapeDtypeStruct:
        """[rows, width] f32: the partial sums of this rank."""
        return jax.ShapeDtypeStruct((self.rows, self.width), jnp.float32)

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        """[rows, width] f32: the sum, equal on all ranks."""
        return jax.ShapeDtypeStruct((self.rows, self.width), jnp.float32)

    @cached_property
    def _chain(self) -> Chain:
        return Chain(self.steps, self.rows, self.wire_dtype, self.axis)

    def _unpack(self, value: jax.Array) -> jax.Array:
        return value[:, : self.width].astype(jnp.float32)
