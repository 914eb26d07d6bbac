"""Counts every DMA and semaphore operation of Pallas TPU kernels, from their jaxpr.

Nothing is compiled or run. Loop counters, grid indices and scalars computed from them are
evaluated, so that a condition on them counts exactly; what depends on data counts as a range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Inventory", "Site", "take_inventory"]


class Site(NamedTuple):
    """One operation in the program text.

    Attributes:
        op: dma_start, dma_wait, semaphore_signal, semaphore_wait, or "block" of a grid.
        route: "hbm->vmem", "vmem->remote hbm"; "local" or "remote" for semaphores.
        shape: of what is moved, "?" where only known while running.
        bytes: without padding; an unknown size counts as 1.
        source: "file.py:line".
        nest: the kernel, loops and conditions around it.
    """

    op: str
    route: str
    shape: str
    bytes: int
    source: str
    nest: str


@dataclass
class Inventory:
    """How often each operation runs.

    Attributes:
        counts: (least, most) by site.
        unknown: loops whose length depends on data; they count as at most ``unknown_trips``.
    """

    counts: dict[Site, tuple[int, int]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)

    def add(self, site: Site, low: int = 1, high: int = 1) -> None:
        """Counts executions of a site."""
        before = self.counts.get(site, (0, 0))
        self.counts[site] = before[0] + low, before[1] + high

    def total(self, op: str, route: str = "", nest: str = "") -> tuple[int, int]:
        """(Least, most) bytes of an operation on routes and in places that contain the texts."""
        return self._sum(op, route, nest, lambda site: site.bytes)

    def executions(self, op: str, route: str = "", nest: str = "") -> tuple[int, int]:
        """(Least, most) executions of an operation."""
        return self._sum(op, route, nest, lambda site: 1)

    def to_json(self) -> dict[str, Any]:
        """As lists."""
        return {
            "counts": [[*site, *runs] for site, runs in self.counts.items()],
            "unknown": sorted(self.unknown),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Inventory:
        """The inverse of :meth:`to_json`."""
        counts = {Site(*row[:-2]): (row[-2], row[-1]) for row in stored["counts"]}
        return cls(counts, set(stored["unknown"]))

    def _sum(
        self, op: str, route: str, nest: str, weight: Callable[[Site], int]
    ) -> tuple[int, int]:
        found = [
            (low * weight(site), high * weight(site))
            for site, (low, high) in self.counts.items()
            if site.op == op and route in site.route and nest in site.nest
        ]
        return sum(low for low, _ in found), sum(high for _, high in found)


def take_inventory(
    function: Callable[..., Any],
    *arguments: Any,
    axis_index: Mapping[str, int] | None = None,
    unknown_trips: int = 1,
) -> Inventory:
    """Traces ``function`` and counts.

    Args:
        function: whatever ``jax.make_jaxpr`` takes.
        arguments: arrays or ``ShapeDtypeStruct``.
        axis_index: coordinates of one device by mesh axis; without them, what depends on the
            device counts as a range.
        unknown_trips: most trips of a loop whose length depends on data.
    """
    from vmem_pool.aot.walker import Walker, jaxpr_of

    walker = Walker(axis_index or {}, unknown_trips)
    walker.run(jaxpr_of(function, *arguments), [], "", ())
    return walker.found
