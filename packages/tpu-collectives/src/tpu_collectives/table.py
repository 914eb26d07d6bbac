"""Which schedule an all-reduce takes: measured where there are measurements, modelled elsewhere.

All schedules of a tree give the same bits, so a choice by size never changes a result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp

from tpu_collectives.cost import schedule_us
from tpu_collectives.errors import CollectiveError
from tpu_collectives.levels import Level, Tree
from tpu_collectives.steps import all_reduce_steps, phases
from tpu_collectives.topology import Topology
from tpu_collectives.wire import lane_unit

__all__ = ["Origin", "ScheduleTable", "TableEntry", "modelled_scatter", "modelled_us"]

Origin: TypeAlias = Literal["measured", "interpreted"]
"""Timed on TPUs, or by the interpreter on CPU (which says nothing about a TPU)."""
_FORMAT = 1


def modelled_us(
    levels: Sequence[Level], scatter: int, rows: int, width: int, wire_dtype: Any
) -> float:
    """Microseconds of one schedule by the cost model."""
    steps = all_reduce_steps(levels, scatter, width, lane_unit(rows, wire_dtype))
    return schedule_us(phases(steps, rows, wire_dtype))


def modelled_scatter(levels: Sequence[Level], rows: int, width: int, wire_dtype: Any) -> int:
    """The schedule that the cost model finds cheapest; fewer phases where two are equal."""
    return min(
        range(len(levels) + 1),
        key=lambda scatter: modelled_us(levels, scatter, rows, width, wire_dtype),
    )


@dataclass(frozen=True)
class TableEntry:
    """A timed choice: the schedule for one size on one kind of slice."""

    topology: str
    tree: tuple[str, ...]
    rows: int
    width: int
    wire_dtype: str
    scatter: int
    us: float
    origin: Origin
    device: str
    """Device kind that was timed."""


@dataclass(frozen=True)
class ScheduleTable:
    """Timed choices, kept as JSON. Sizes without an entry fall back to the cost model."""

    entries: tuple[TableEntry, ...] = ()

    def lookup(
        self, topology: Topology, tree: Tree, rows: int, width: int, wire_dtype: Any
    ) -> int | None:
        """Levels to scatter for this size, or None. Interpreted times are never looked up."""
        key = (shape_of(topology), tuple(tree), rows, width, jnp.dtype(wire_dtype).name)
        for entry in self.entries:
            if entry.origin == "measured" and _key(entry) == key:
                return entry.scatter
        return None

    def updated(self, entries: Sequence[TableEntry]) -> ScheduleTable:
        """A table in which these entries replace those of the same size."""
        new = {_key(entry) for entry in entries}
        kept = tuple(entry for entry in self.entries if _key(entry) not in new)
        return ScheduleTable(kept + tuple(entries))

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        content = {"format": _FORMAT, "entries": [asdict(entry) for entry in self.entries]}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ScheduleTable:
        """Read a table that :meth:`save` wrote.

        Raises:
            CollectiveError: not such a file, or another format.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise CollectiveError(
                    f"{path} has table format {content['format']}; this version reads {_FORMAT}"
                )
            entries = [{**entry, "tree": tuple(entry["tree"])} for entry in content["entries"]]
            return cls(tuple(TableEntry(**entry) for entry in entries))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise CollectiveError(f"{path} is not a schedule table: {error}") from error


def shape_of(topology: Topology) -> str:
    """Hosts, chips and cores: what a schedule depends on, whatever the devices are called."""
    chips = topology.chips // topology.hosts
    return f"{topology.hosts} hosts x {chips} chips x {topology.cores_per_chip} cores"


def _key(entry: TableEntry) -> tuple[str, tuple[str, ...], int, int, str]:
    return (entry.topology, entry.tree, entry.rows, entry.width, entry.wire_dtype)
