"""The same bits without a kernel: terms of all ranks in, what every rank must hold out."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpu_collectives.levels import Tree, default_tree, tree_levels
from tpu_collectives.topology import Topology

__all__ = ["all_reduce", "arg_max"]


def all_reduce(
    topology: Topology, terms: Any, wire_dtype: Any, tree: Tree | None = None
) -> np.ndarray:
    """The sum of [ranks, ...] terms, f32, with the rounding points of :class:`AllReduce`.

    For every level of the tree: s = round((r(t0) + r(t1)) + ... ), where r rounds to the wire
    dtype, the additions are f32 and the terms t are those of a group in rank order.
    """
    levels = tree_levels(topology, default_tree(topology) if tree is None else tree)
    sums = _rounded(np.asarray(terms, np.float32), wire_dtype)
    for level in levels:
        members = [
            [level.peer(rank, position) for position in range(level.size)]
            for rank in range(topology.ranks)
        ]
        sums = np.stack([_rounded(_sum(sums[group]), wire_dtype) for group in members])
    return sums[0]


def arg_max(values: Any, indices: Any) -> tuple[np.ndarray, np.ndarray]:
    """Per row of [ranks, rows], the largest value and the lowest index that has it.

    A NaN counts as minus infinity.
    """
    values = np.where(np.isnan(values), -np.inf, np.asarray(values, np.float32))
    best = values.max(axis=0)
    tied = np.where(values == best, indices, np.iinfo(np.int32).max)
    return best, tied.min(axis=0).astype(np.int32)


def _sum(terms: np.ndarray) -> np.ndarray:
    total: np.ndarray = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _rounded(values: np.ndarray, dtype: Any) -> np.ndarray:
    return values.astype(dtype).astype(np.float32)
