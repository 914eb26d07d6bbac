"""Reduce-scatter: every rank gets its own columns of the sum over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from tpu_collectives.chain import Chain, Chained
from tpu_collectives.checks import check_block, check_lanes, check_wire
from tpu_collectives.errors import CollectiveError
from tpu_collectives.levels import Tree, default_tree, owner_order, tree_levels
from tpu_collectives.steps import Step, scatter_steps
from tpu_collectives.topology import Topology
from tpu_collectives.wire import LANES

__all__ = ["ReduceScatter"]


@dataclass(frozen=True)
class ReduceScatter(Chained):
    """Reduce-scatter of [rows, width] partial sums: ``start``, ``advance``, ``finish``.

    ``finish`` gives rank r the columns r * width / n .. (r + 1) * width / n of the sum, with the
    bits that :class:`~tpu_collectives.AllReduce` gives them for the same tree and wire dtype.

    Args:
        topology: the ranks.
        rows: rows of a partial.
        width: columns of a partial; each rank's part is a multiple of 128, unless there is one.
        wire_dtype: bfloat16 or float32.
        tree: partitions to sum within, innermost first; by default the host, then across hosts.
        axis: mesh axis whose index is the rank.

    Raises:
        CollectiveError: sizes below 1, a width that does not divide, another wire dtype, or a tree
            that does not connect all ranks once.
    """

    topology: Topology
    rows: int
    width: int
    wire_dtype: Any = jnp.bfloat16
    tree: Tree | None = None
    axis: str = "ranks"

    def __post_init__(self) -> None:
        check_block(self.rows, self.width)
        check_wire(self.wire_dtype)
        ranks = self.topology.ranks
        if self.width % ranks:
            raise CollectiveError(
                f"{self.width} columns do not divide among {ranks} ranks; pad them to"
                f" {-(-self.width // (LANES * ranks)) * LANES * ranks}"
            )
        if ranks > 1:
            check_lanes(self.width // ranks, "a rank's part")
        tree_levels(self.topology, self._summed)

    @property
    def _summed(self) -> Tree:
        return default_tree(self.topology) if self.tree is None else self.tree

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The phases, in order."""
        return scatter_steps(tree_levels(self.topology, self._summed), self.width)

    @property
    def input(self) -> jax.ShapeDtypeStruct:
        """[rows, width] f32: the partial sums of this rank."""
        return jax.ShapeDtypeStruct((self.rows, self.width), jnp.float32)

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        """[rows, width / n] f32: this rank's columns of the sum."""
        return jax.ShapeDtypeStruct((self.rows, self.width // self.topology.ranks), jnp.float32)

    @cached_property
    def _chain(self) -> Chain:
        return Chain(self.steps, self.rows, self.wire_dtype, self.axis)

    def _pack(self, x: jax.Array) -> jax.Array:
        owners = owner_order(tree_levels(self.topology, self._summed))
        if owners == tuple(range(self.topology.ranks)):
            return x
        part = self.width // self.topology.ranks
        return jnp.concatenate([x[:, r * part : (r + 1) * part] for r in owners], axis=1)

    def _unpack(self, value: jax.Array) -> jax.Array:
        return value.astype(jnp.float32)
