"""Slice names such as ``tpu7x:2x2x4`` to chip grids, hosts and cores, without a device.

The facts of each generation are those of Google's TPU documentation, and the ids, processes and
coordinates are those that libtpu gives to a compile-only topology of the same name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

from tpu_collectives.errors import TopologyError

__all__ = ["GENERATIONS", "Coords", "Generation", "Slice", "parse_slice", "wraps"]

Coords = tuple[int, int, int]

HOST_BOUNDS: Coords = (2, 2, 1)
"""Chips of one host, along x, y and z, in every generation below."""


@dataclass(frozen=True)
class Generation:
    """What a name's first half says.

    Attributes:
        name: as in a slice name, e.g. ``tpu7x``.
        kind: what ``device_kind`` of its devices says.
        dims: 2 for a flat grid, 3 for a cube.
        cores: JAX devices per chip.
    """

    name: str
    kind: str
    dims: int
    cores: int


GENERATIONS = {
    generation.name: generation
    for generation in (
        Generation("tpu7x", "TPU7x", dims=3, cores=2),
        Generation("v6e", "TPU v6 lite", dims=2, cores=1),
        Generation("v5e", "TPU v5 lite", dims=2, cores=1),
        Generation("v5p", "TPU v5", dims=3, cores=1),
        Generation("v4", "TPU v4", dims=3, cores=2),
    )
}


@dataclass(frozen=True)
class Slice:
    """A parsed name. ``bounds`` are chips along x, y and z."""

    generation: Generation
    bounds: Coords

    @property
    def host_bounds(self) -> Coords:
        """Chips of one host along x, y and z; less than 2x2x1 only in slices of under 4 chips."""
        x, y, _ = self.bounds
        return (min(x, HOST_BOUNDS[0]), min(y, HOST_BOUNDS[1]), 1)

    def host_of(self, coords: Coords) -> int:
        """Process that owns a chip: hosts are counted along x first, then y, then z."""
        x, y, z = (at // size for at, size in zip(coords, self.host_bounds))
        across, down, _ = (n // size for n, size in zip(self.bounds, self.host_bounds))
        return (z * down + y) * across + x

    def chips(self) -> tuple[Coords, ...]:
        """Coordinates of all chips, x fastest."""
        nx, ny, nz = self.bounds
        return tuple((x, y, z) for z, y, x in product(range(nz), range(ny), range(nx)))


def parse_slice(name: str) -> Slice:
    """Parses ``GENERATION:AxB`` or ``GENERATION:AxBxC``, sizes in chips.

    Raises:
        TopologyError: unknown generation, wrong number of sizes, or sizes that hosts of 2x2x1
            chips do not fill.
    """
    match = re.fullmatch(r"([a-z0-9]+):([1-9]\d*(?:x[1-9]\d*)*)", name)
    if match is None:
        raise TopologyError(f"{name!r} is not a slice name; write for instance tpu7x:2x2x4")
    if match[1] not in GENERATIONS:
        known = ", ".join(GENERATIONS)
        raise TopologyError(f"unknown TPU generation {match[1]!r} in {name!r} (known: {known})")
    generation = GENERATIONS[match[1]]
    sizes = tuple(int(size) for size in match[2].split("x"))
    if len(sizes) != generation.dims:
        raise TopologyError(
            f"{name!r} gives {len(sizes)} sizes; a {generation.name} slice has {generation.dims}"
        )
    x, y, z = (*sizes, 1)[:3]
    within_a_host = x <= HOST_BOUNDS[0] and y <= HOST_BOUNDS[1] and z == 1
    if not within_a_host and (x % HOST_BOUNDS[0] or y % HOST_BOUNDS[1]):
        raise TopologyError(
            f"{name!r} does not divide into hosts of 2x2x1 chips; the first two sizes must be even"
        )
    return Slice(generation, (x, y, z))


def wraps(dims: int, bounds: Coords) -> tuple[bool, bool, bool]:
    """Which dimensions of a complete slice close to a ring.

    Cubes wrap in all three dimensions when they are built from 4x4x4 blocks; flat grids wrap along
    a dimension that spans the 16 chips of a pod. Source: Google's TPU v5p and v6e documentation.
    """
    if dims == 3:
        ring = all(size % 4 == 0 for size in bounds)
        return (ring, ring, ring)
    x, y, _ = bounds
    return (x == 16, y == 16, False)
