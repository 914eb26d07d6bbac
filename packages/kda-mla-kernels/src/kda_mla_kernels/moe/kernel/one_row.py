"""The schedule of a single row on a rank that has a share of every expert.

Each of its k routes is to an expert of its own, so how many loads there are, and the slot of each,
is known while tracing: there is no loop and no list to look up but that of the chosen experts.
All loads start at once, those needed first in front, and entries are worked on as they arrive::

    gate and up of all entries  ->  activation of all  ->  down of all
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from kda_mla_kernels.moe.kernel.memory import EXPERT, LayerExperts, RoutedExpertsScratch
from kda_mla_kernels.moe.kernel.products import Entry, ExpertProducts
from kda_mla_kernels.moe.kernel.routing import entries_of_one_row

__all__ = ["OneRow"]

GATE_UP, DOWN = range(2)
"""Loads of an expert."""
TOGETHER = (4, 8)
"""Entries that are waited for together, for gate and up and for down: more would come later, and
fewer leave the schedule less to fill waits with."""


@dataclass(frozen=True)
class _Entry:
    """The n-th chosen expert, in the n-th slot."""

    number: int
    row = 0

    @property
    def slot(self) -> int:
        return self.number

    @property
    def held(self) -> int:
        return self.number


@dataclass(frozen=True)
class OneRow:
    """Implements :class:`~kda_mla_kernels.moe.kernel.stage.Schedule`."""

    products: ExpertProducts
    entries: int

    loads = (("gate_up", "scales"), ("down",))

    @property
    def places(self) -> int:
        """All entries."""
        return self.entries

    @property
    def slots(self) -> int:
        """One for each entry."""
        return self.entries

    @property
    def held_slots(self) -> int:
        """One for each entry."""
        return self.entries

    def start(
        self,
        scratch: RoutedExpertsScratch,
        layer: LayerExperts,
        chosen: jax.Array,
        weights: jax.Array,
        first: Any,
    ) -> None:
        """Starts all loads and writes the entries' weights; the rest follows from the place."""
        experts, shares = entries_of_one_row(chosen[:1], weights[:1], self.entries)
        scratch.experts.write({EXPERT: experts})
        scratch.weights.write({0: shares})
        scratch.experts.ready()
        for load, names in enumerate(self.loads):
            for number in range(self.entries):
                expert = scratch.experts.numbers[EXPERT, number]
                for name in names:
                    layer.load(scratch, name, expert, number, scratch.slot_sems.at[load, number])
        scratch.weights.ready()

    def work(self, scratch: RoutedExpertsScratch, layer: LayerExperts) -> None:
        """Adds all entries to the row's sum."""
        self._as_they_arrive(scratch, layer, GATE_UP, self.products.gate_up)
        self.products.activate(scratch)
        self._as_they_arrive(scratch, layer, DOWN, self.products.down)

    def _as_they_arrive(
        self,
        scratch: RoutedExpertsScratch,
        layer: LayerExperts,
        load: int,
        work: Callable[[RoutedExpertsScratch, Entry, int], None],
    ) -> None:
        for first in range(0, self.entries, TOGETHER[load]):
            together = range(first, min(first + TOGETHER[load], self.entries))
            for number in together:
                layer.wait(scratch, self.loads[load], scratch.slot_sems.at[load, number])
            for number in together:
                work(scratch, _Entry(number), number)
