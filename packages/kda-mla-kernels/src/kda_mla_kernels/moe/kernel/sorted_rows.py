"""The schedule of several rows, or of experts that other ranks hold a part of.

The routes of all rows form one list sorted by expert. It is worked off in chunks of entries, while
the experts of the next entries load. A chunk's gate and up are computed together with the down of
the chunk before, so that products need not wait for one another::

    loads      until slots are full |  into slots that chunk 0 leaves  |  ...  |
    products   gate, up of chunk 0  |  gate, up of chunk 1             |  ...  |
                                    |  down of chunk 0                 |  ...  |  down of the last

Rows may share an expert, so the entries of a chunk may need as few as one. Each entry knows how
many experts it and those before it have (*seen*), and loads and waits are loops up to such numbers,
which turn once for each expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kda_mla_kernels.moe.kernel.memory import (
    EXPERT,
    EXPERTS,
    HELD,
    HELD_OF,
    ROW,
    SEEN,
    SLOT,
    SLOT_OF,
    LayerExperts,
    RoutedExpertsScratch,
)
from kda_mla_kernels.moe.kernel.products import ExpertProducts
from kda_mla_kernels.moe.kernel.routing import Demand, sorted_entries

__all__ = ["SortedRows"]


@dataclass(frozen=True)
class _Entry:
    """An entry of the list, which says where its row and its expert are."""

    lists: Any
    """SMEM i32 [8, N]"""
    number: Any

    @property
    def row(self) -> Any:
        return self.lists[ROW, self.number]

    @property
    def slot(self) -> Any:
        return self.lists[SLOT, self.number]

    @property
    def held(self) -> Any:
        return self.lists[HELD, self.number]


@dataclass(frozen=True)
class SortedRows:
    """Implements :class:`~kda_mla_kernels.moe.kernel.stage.Schedule`.

    Attributes:
        top_k: k.
        chunk, ahead: see :class:`~kda_mla_kernels.moe.kernel.stage.RoutedExperts`.
    """

    products: ExpertProducts
    top_k: int
    chunk: int
    ahead: int

    loads = (("gate_up", "scales", "down"),)

    @property
    def places(self) -> int:
        """Those of a chunk."""
        return self.chunk

    @cached_property
    def entries(self) -> int:
        """N, in whole chunks."""
        return -(-self.products.block.rows * self.top_k // self.chunk) * self.chunk

    @property
    def slots(self) -> int:
        """Experts whose gate and up are in VMEM."""
        return min(self.entries, self.chunk + self.ahead)

    @property
    def held_slots(self) -> int:
        """Experts whose down and scales are: a chunk more, whose down is still to come."""
        return min(self.entries, self.slots + self.chunk)

    def start(
        self,
        scratch: RoutedExpertsScratch,
        layer: LayerExperts,
        chosen: jax.Array,
        weights: jax.Array,
        first: Any,
    ) -> None:
        """Lists the experts, starts the first loads, then lists the entries."""
        held = self.products.shape.experts
        if held < chosen.shape[1]:
            column = lax.broadcasted_iota(jnp.int32, chosen.shape, 1)
            mine = (column >= first) & (column < first + held)
            chosen = jnp.where(mine, chosen, 0.0)
        demand = Demand.of(chosen)
        self._list_experts(scratch, demand, first)
        at_first = jnp.minimum(scratch.experts.numbers[EXPERTS, 0], self.slots)
        self._load(scratch, layer, 0, at_first)
        self._list_entries(scratch, demand, chosen, weights)

    def work(self, scratch: RoutedExpertsScratch, layer: LayerExperts) -> None:
        """Adds all entries to their rows' sums, chunk by chunk: down is one behind gate and up."""
        self._wait(scratch, layer, 0, self._seen(scratch, self.chunk))
        self._gate_up(scratch, 0)

        @pl.loop(1, self.entries // self.chunk)
        def _(chunk: jax.Array) -> None:
            first = chunk * self.chunk
            before, now = (self._started(scratch, at) for at in (first - self.chunk, first))
            self._load(scratch, layer, before, now)
            before, now = (self._seen(scratch, at) for at in (first, first + self.chunk))
            self._wait(scratch, layer, before, now)
            self.products.activate(scratch)
            self._gate_up(scratch, first)
            self._down(scratch, first - self.chunk)

        self.products.activate(scratch)
        self._down(scratch, self.entries - self.chunk)

    # Lists

    def _list_experts(self, scratch: RoutedExpertsScratch, demand: Demand, first: Any) -> None:
        experts = demand.listed(self.entries) - jnp.asarray(first, jnp.float32)
        place = lax.broadcasted_iota(jnp.int32, (1, self.entries), 1).astype(jnp.float32)
        columns = {
            EXPERT: jnp.maximum(experts, 0.0),
            SLOT_OF: _remainders(place, self.slots),
            HELD_OF: _remainders(place, self.held_slots),
            EXPERTS: jnp.broadcast_to(demand.experts, place.shape),
        }
        scratch.experts.write(columns)
        scratch.experts.ready()

    def _list_entries(
        self,
        scratch: RoutedExpertsScratch,
        demand: Demand,
        chosen: jax.Array,
        weights: jax.Array,
    ) -> None:
        found = sorted_entries(demand, chosen, weights, self.entries)
        columns = {
            ROW: found.rows,
            SLOT: _remainders(found.seen - 1, self.slots),
            HELD: _remainders(found.seen - 1, self.held_slots),
            SEEN: found.seen,
        }
        scratch.entries.write(columns)
        scratch.weights.write({0: found.weights})
        scratch.entries.ready()
        scratch.weights.ready()

    def _seen(self, scratch: RoutedExpertsScratch, entry: Any) -> Any:
        """Experts of the entries before this one, of which there are some."""
        return scratch.entries.numbers[SEEN, entry - 1]

    def _started(self, scratch: RoutedExpertsScratch, entry: Any) -> Any:
        """Experts whose loads are under way or done when the work on this entry begins: as many as
        there are slots, counted from its own."""
        own = self._seen(scratch, entry + 1) - 1
        return jnp.minimum(own + self.slots, scratch.experts.numbers[EXPERTS, 0])

    # Loads, of experts by their ordinals

    def _load(
        self, scratch: RoutedExpertsScratch, layer: LayerExperts, begin: Any, end: Any
    ) -> None:
        @pl.loop(begin, end)
        def _(ordinal: Any) -> None:
            numbers = scratch.experts.numbers
            expert, sem = numbers[EXPERT, ordinal], self._sem(scratch, ordinal)
            for name in self.loads[0]:
                slot = numbers[SLOT_OF if name == "gate_up" else HELD_OF, ordinal]
                layer.load(scratch, name, expert, slot, sem)

    def _wait(
        self, scratch: RoutedExpertsScratch, layer: LayerExperts, begin: Any, end: Any
    ) -> None:
        @pl.loop(begin, end)
        def _(ordinal: Any) -> None:
            layer.wait(scratch, self.loads[0], self._sem(scratch, ordinal))

    def _sem(self, scratch: RoutedExpertsScratch, ordinal: Any) -> Any:
        return scratch.slot_sems.at[0, scratch.experts.numbers[SLOT_OF, ordinal]]

    # Products of the chunk that begins with an entry

    def _gate_up(self, scratch: RoutedExpertsScratch, first: Any) -> None:
        for place in range(self.chunk):
            self.products.gate_up(scratch, self._entry(scratch, first + place), place)

    def _down(self, scratch: RoutedExpertsScratch, first: Any) -> None:
        for place in range(self.chunk):
            self.products.down(scratch, self._entry(scratch, first + place), place)

    def _entry(self, scratch: RoutedExpertsScratch, number: Any) -> _Entry:
        return _Entry(scratch.entries.numbers, number)


def _remainders(numbers: jax.Array, divisor: int) -> jax.Array:
    """Of whole f32 numbers; 0 for those below 0."""
    numbers = jnp.maximum(numbers, 0.0)
    # Halves keep the quotients off their steps.
    return numbers - jnp.floor((numbers + 0.5) / divisor) * divisor
