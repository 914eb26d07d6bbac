"""Groups that exchange, as arithmetic on rank numbers.

A kernel is traced once for all ranks, so it cannot look its group up in a table: it computes its
position and its peers from its own rank. Ranks are ordered host by host, chip by chip, core by
core, so the groups of every partition of a topology stand at a constant distance::

    ranks of 2 hosts     0  1  2  3 | 4  5  6  7
    chip, stride 1       (0  1)(2  3)(4  5)(6  7)
    host, stride 1       (0  1  2  3)(4  5  6  7)
    lane, stride 4       (0 4)(1 5)(2 6)(3 7)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from tpu_collectives.errors import CollectiveError
from tpu_collectives.topology import GroupBy, Topology

__all__ = [
    "Level",
    "Tree",
    "default_tree",
    "level_of",
    "levels_of",
    "owner_order",
    "reached_by",
    "tree_levels",
]

Tree: TypeAlias = tuple[GroupBy, ...]
"""Partitions that are reduced one after another, the innermost first."""


@dataclass(frozen=True)
class Level:
    """One partition of the ranks into equal groups.

    Args:
        size: ranks of a group.
        stride: distance between neighbours of a group in rank numbers.
        on_chip: a group is the cores of one chip.
    """

    size: int
    stride: int
    on_chip: bool = False

    def position(self, rank: Any) -> Any:
        """Number of a rank in its group; int or traced int32."""
        return (rank // self.stride) % self.size

    def peer(self, rank: Any, position: Any) -> Any:
        """The rank at a position of the group of ``rank``; int or traced int32."""
        return rank + (position - self.position(rank)) * self.stride


def level_of(topology: Topology, by: GroupBy) -> Level:
    """The level whose groups are ``topology.groups(by)``.

    Raises:
        TopologyError: an unknown partition.
        CollectiveError: ranks of a group at varying distances.
    """
    groups = topology.groups(by)
    first = groups[0]
    level = Level(len(first), first[1] - first[0] if len(first) > 1 else 1, on_chip=by == "chip")
    for group in groups:
        expected = tuple(level.peer(group[0], position) for position in range(level.size))
        if group != expected:
            raise CollectiveError(
                f"ranks {group} of one {by} of {topology.name} do not stand at a constant"
                " distance; take a topology with whole chips and hosts"
            )
    return level


def default_tree(topology: Topology) -> Tree:
    """The ranks of a host first, then one rank of every host; one level on a single host."""
    return ("host", "lane") if topology.hosts > 1 else ("all",)


def levels_of(topology: Topology, tree: Sequence[GroupBy]) -> tuple[Level, ...]:
    """The levels of a tree, without those where every rank is alone; at least one.

    Raises:
        TopologyError: an unknown partition.
        CollectiveError: no partition, or two that overlap.
    """
    found = [level_of(topology, by) for by in tree]
    if len(reached_by(found)) != prod(level.size for level in found) or not found:
        raise CollectiveError(
            f"the partitions {tuple(tree)} of {topology.name} must be at least one and meet in"
            " single ranks, like ('host', 'lane') or ('chip', 'core')"
        )
    return tuple(level for level in found if level.size > 1) or (found[0],)


def tree_levels(topology: Topology, tree: Sequence[GroupBy]) -> tuple[Level, ...]:
    """As :func:`levels_of`, for partitions that together connect all ranks.

    Raises:
        TopologyError: an unknown partition.
        CollectiveError: partitions that overlap or leave ranks out.
    """
    levels = levels_of(topology, tree)
    reached = len(reached_by(levels))
    if reached != topology.ranks:
        raise CollectiveError(
            f"the tree {tuple(tree)} connects {reached} of the {topology.ranks} ranks of"
            f" {topology.name}; use ('all',), ('host', 'lane') or ('chip', 'core', 'lane')"
        )
    return levels


def reached_by(levels: Sequence[Level]) -> set[int]:
    """Ranks that exchange with rank 0 through these levels, itself included."""
    reached = {0}
    for level in levels:
        reached = {level.peer(rank, p) for rank in reached for p in range(level.size)}
    return reached


def owner_order(levels: Sequence[Level]) -> tuple[int, ...]:
    """Ranks in the order in which scattering level by level hands out equal column blocks.

    The first level splits the width by position, the second splits each part, and so on; the rank
    at positions (p0, p1, ..) is p0 * stride0 + p1 * stride1 + ...
    """
    ranks = [0]
    for level in levels:
        ranks = [rank + level.stride * p for rank in ranks for p in range(level.size)]
    return tuple(ranks)
