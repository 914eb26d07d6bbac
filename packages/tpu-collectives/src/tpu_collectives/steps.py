"""The phases of a collective as plain data: who exchanges what, in which order.

A **tree** says which ranks are summed together and in which order, and so decides every bit of the
result. A **schedule** only says how the blocks travel. The schedules of a tree of m levels are
numbered by how many of its levels are scattered; all give the same bits::

    levels (8, 4)     scatter 0   reduce 8, reduce 4                         2 phases, whole width
                      scatter 1   scatter 8, reduce 4, gather 8              3 phases, an eighth
                      scatter 2   scatter 8, scatter 4, gather 4, gather 8   4 phases, a 32nd
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

from tpu_collectives.cost import Phase
from tpu_collectives.levels import Level
from tpu_collectives.wire import LANES, Wire

__all__ = ["Kind", "Step", "all_reduce_steps", "gather_steps", "phases", "scatter_steps"]


class Kind(Enum):
    """What a phase does with the blocks of a group."""

    REDUCE = "reduce"
    """Everybody gets all blocks and adds them."""
    SCATTER = "scatter"
    """Everybody gets the blocks of its own columns and adds them."""
    GATHER = "gather"
    """Everybody gets all blocks and lays them side by side."""


@dataclass(frozen=True)
class Step:
    """One phase. ``columns`` is the width of the block that a rank sends to one peer."""

    kind: Kind
    level: Level
    columns: int


def all_reduce_steps(
    levels: Sequence[Level], scatter: int, width: int, unit: int = LANES
) -> tuple[Step, ...]:
    """Phases of an all-reduce that scatters the first levels of its tree.

    The width is padded so that every block is a multiple of ``unit`` columns.
    """
    scattered, reduced = levels[:scatter], levels[scatter:]
    unit *= prod(level.size for level in scattered)
    columns = -(-width // unit) * unit
    down = scatter_steps(scattered, columns)
    block = down[-1].columns if down else columns
    across = tuple(Step(Kind.REDUCE, level, block) for level in reduced)
    return down + across + gather_steps(tuple(reversed(scattered)), block)


def scatter_steps(levels: Sequence[Level], columns: int) -> tuple[Step, ...]:
    """Phases that leave every rank with its part of the sum."""
    steps = []
    for level in levels:
        columns //= level.size
        steps.append(Step(Kind.SCATTER, level, columns))
    return tuple(steps)


def gather_steps(levels: Sequence[Level], columns: int) -> tuple[Step, ...]:
    """Phases that give every rank the blocks of all, ``columns`` wide at first."""
    steps = []
    for level in levels:
        steps.append(Step(Kind.GATHER, level, columns))
        columns *= level.size
    return tuple(steps)


def phases(steps: Iterable[Step], rows: int, dtype: Any) -> tuple[Phase, ...]:
    """The phases for the cost model, with blocks of so many rows."""
    return tuple(
        Phase(
            step.level.size - 1,
            Wire(rows, step.columns, dtype).bytes,
            sibling=step.level.on_chip and step.level.size == 2,
        )
        for step in steps
        if step.level.size > 1
    )
