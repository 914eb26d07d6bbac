"""Places of ranks: numbering, order and distances, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_collectives.names import GENERATIONS, Coords, wraps

if TYPE_CHECKING:
    import jax

__all__ = ["Grid", "Place", "Site", "grid_of", "number", "order_of", "site_of"]


@dataclass(frozen=True)
class Place:
    """Where a rank sits. ``host`` and ``chip`` count from 0 in rank order over the topology."""

    host: int
    chip: int
    core: int
    lane: int
    """Number of the rank within its host."""
    coords: Coords | None
    """Chip coordinates x, y, z; None where chips have none (CPU, GPU)."""


@dataclass(frozen=True)
class Grid:
    """The chip network: a mesh, with rings along the dimensions that wrap."""

    bounds: Coords
    wrap: tuple[bool, bool, bool]

    def hops(self, a: Coords, b: Coords) -> int:
        """Links on a shortest path between two chips."""
        total = 0
        for at, to, size, ring in zip(a, b, self.bounds, self.wrap):
            distance = abs(at - to)
            total += min(distance, size - distance) if ring else distance
        return total


@dataclass(frozen=True)
class Site:
    """A rank before it is numbered: process, chip and core as the platform names them."""

    process: int
    chip: tuple[int, ...]
    core: int
    coords: Coords | None


def site_of(device: jax.Device) -> Site:
    """Where a device sits; on other platforms than TPU every device is a chip of its own."""
    if device.platform != "tpu":
        return Site(device.process_index, (device.id,), 0, None)
    x, y, z = device.coords
    return Site(device.process_index, (z, y, x), device.core_on_chip, (x, y, z))


def order_of(sites: Sequence[Site]) -> list[int]:
    """Indices of the sites by process, then chip, then core: the order of ranks."""
    return sorted(range(len(sites)), key=lambda i: (sites[i].process, sites[i].chip, sites[i].core))


def number(sites: Sequence[Site]) -> tuple[Place, ...]:
    """Places of sites that are already in rank order."""
    hosts: dict[int, int] = {}
    chips: dict[tuple[int, ...], int] = {}
    lanes: Counter[int] = Counter()
    places = []
    for site in sites:
        host = hosts.setdefault(site.process, len(hosts))
        chip = chips.setdefault((site.process, *site.chip), len(chips))
        places.append(Place(host, chip, site.core, lanes[host], site.coords))
        lanes[host] += 1
    return tuple(places)


def grid_of(sites: Sequence[Site], kind: str) -> Grid | None:
    """The chip network of TPU devices: rings only where the devices fill their whole box."""
    chips = {site.coords for site in sites if site.coords is not None}
    if not chips:
        return None
    low = [min(chip[d] for chip in chips) for d in range(3)]
    high = [max(chip[d] for chip in chips) for d in range(3)]
    x, y, z = (end - start + 1 for start, end in zip(low, high))
    dims = next((g.dims for g in GENERATIONS.values() if g.kind == kind), 0)
    if not dims or len(chips) != x * y * z:
        return Grid((x, y, z), (False, False, False))
    return Grid((x, y, z), wraps(dims, (x, y, z)))
