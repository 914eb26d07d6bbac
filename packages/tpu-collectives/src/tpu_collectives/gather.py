"""All-gather: the blocks of all ranks side by side, on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from tpu_collectives.chain import Chain, Chained
from tpu_collectives.checks import check_block, check_lanes, check_payload
from tpu_collectives.errors import CollectiveError
from tpu_collectives.levels import Tree, levels_of
from tpu_collectives.steps import Step, gather_steps
from tpu_collectives.topology import Topology

__all__ = ["AllGather"]


@dataclass(frozen=True)
class AllGather(Chained):
    """All-gather of [rows, width] blocks: ``start``, ``advance``, ``finish`` as in AllReduce.

    ``finish`` gives [rows, members * width], the blocks of the members in rank order and the same
    on each of them. Members are the ranks that ``within`` connects: all ranks in one phase by
    default; ``("host",)`` those of a host; ``("host", "lane")`` all ranks in two phases, which
    takes fewer messages.

    Args:
        topology: the ranks.
        rows: rows of a block.
        width: columns of a block; a multiple of 128, unless there is one member.
        dtype: bfloat16, float32 or int32; nothing is rounded except to it.
        within: partitions to gather within, innermost first.
        axis: mesh axis whose index is the rank.

    Raises:
        CollectiveError: sizes below 1, a width that is no multiple of 128, another dtype, or
            partitions that overlap or are not given innermost first.
    """

    topology: Topology
    rows: int
    width: int
    dtype: Any = jnp.bfloat16
    within: Tree = ("all",)
    axis: str = "ranks"

    def __post_init__(self) -> None:
        check_block(self.rows, self.width)
        check_payload(self.dtype)
        if self.members > 1:
            check_lanes(self.width, "a gathered block")
        strides = [step.level.stride for step in self.steps]
        if strides != sorted(strides):
            raise CollectiveError(
                f"blocks gathered within {self.within} would not stand in rank order; name the"
                " innermost partition first, like ('host', 'lane')"
            )

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The phases, in order."""
        return gather_steps(levels_of(self.topology, self.within), self.width)

    @property
    def members(self) -> int:
        """Ranks whose blocks a rank gets, itself included."""
        last = self.steps[-1]
        return last.columns * last.level.size // self.width

    @property
    def input(self) -> jax.ShapeDtypeStruct:
        """[rows, width] of ``dtype``: the block of this rank."""
        return jax.ShapeDtypeStruct((self.rows, self.width), self.dtype)

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        """[rows, members * width] of ``dtype``."""
        return jax.ShapeDtypeStruct((self.rows, self.members * self.width), self.dtype)

    @cached_property
    def _chain(self) -> Chain:
        return Chain(self.steps, self.rows, self.dtype, self.axis)

    def _unpack(self, value: jax.Array) -> jax.Array:
        return value.astype(self.dtype)
