"""Which ranks there are, where they sit, and in which order.

A **rank** is one JAX device: a TensorCore on TPU v7, where two of them share a chip and eight a
host. Every schedule of a collective is a function of rank numbers, so their order must be the same
in every process and independent of how a program lists its devices: on TPU by host, then chip
(z, y, x), then core; elsewhere by process and id. ``jax.make_mesh`` reorders devices for its own
purposes; :meth:`Topology.mesh` does not.

::

    tpu7x:2x2x1, ranks of one host       bit 0 core, bit 1 x, bit 2 y

        y
        1   | 4  5 |   | 6  7 |
        0   | 0  1 |   | 2  3 |
               0          1     x

Nothing here is traced or touches a device, except :meth:`Topology.devices` and
:meth:`Topology.mesh`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from tpu_collectives.errors import TopologyError
from tpu_collectives.names import GENERATIONS, parse_slice, wraps
from tpu_collectives.places import Grid, Place, Site, grid_of, number, order_of, site_of

if TYPE_CHECKING:
    import jax

__all__ = ["GroupBy", "Topology"]

GroupBy: TypeAlias = Literal["all", "chip", "core", "host", "lane"]
"""What the ranks of a group share: everything, the chip, host and core, the host, or the lane."""


@dataclass(frozen=True)
class Topology:
    """Ranks in order, with their places. Made by the class methods.

    Args:
        name: slice name or a description, for messages and tables.
        places: one entry per rank.
        grid: None where every chip reaches every other in one hop.
        jax_devices: devices in rank order, or None if they are looked up when asked for.

    Raises:
        TopologyError: no ranks, or chips or hosts with different numbers of ranks.
    """

    name: str
    places: tuple[Place, ...]
    grid: Grid | None = None
    jax_devices: tuple[jax.Device, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.places:
            raise TopologyError("a topology needs at least one rank")
        for what in ("chip", "host"):
            sizes = [len(group) for group in self.groups(what)]
            if len(set(sizes)) > 1:
                raise TopologyError(
                    f"{self.ranks} ranks do not divide evenly: the {what}s of {self.name} would"
                    f" have {_listed(sizes)} ranks; use the same number on every {what}"
                )

    @classmethod
    def from_devices(cls, devices: Iterable[jax.Device]) -> Topology:
        """The topology of these devices, whatever order they are listed in.

        Devices other than TPUs count as one chip each, fully connected.

        Raises:
            TopologyError: none, duplicates, more than one kind, or an uneven split over chips or
                hosts.
        """
        given = tuple(devices)
        _check_devices(given)
        sites = [site_of(device) for device in given]
        order = order_of(sites)
        ordered = tuple(given[i] for i in order)
        kind = given[0].device_kind
        name = f"{kind} x{len(given)}"
        return cls(name, number([sites[i] for i in order]), grid_of(sites, kind), ordered)

    @classmethod
    def from_name(cls, name: str) -> Topology:
        """The topology of a TPU slice, e.g. ``tpu7x:2x2x4`` (16 chips), from its name alone.

        Only :meth:`devices` and :meth:`mesh` then need libtpu; they give compile-only devices.

        Raises:
            TopologyError: a name that :func:`tpu_collectives.names.parse_slice` refuses.
        """
        parsed = parse_slice(name)
        sites = [
            Site(parsed.host_of(coords), coords[::-1], core, coords)
            for coords in parsed.chips()
            for core in range(parsed.generation.cores)
        ]
        grid = Grid(parsed.bounds, wraps(parsed.generation.dims, parsed.bounds))
        return cls(name, number([sites[i] for i in order_of(sites)]), grid)

    @classmethod
    def virtual(cls, ranks: int, cores_per_chip: int = 2, chips_per_host: int = 4) -> Topology:
        """Hosts, chips and cores laid over CPU devices, so that a test sees what a slice has.

        Chips of a host stand two by two where their number is even, hosts along z. Fewer ranks than
        a host holds make one smaller host; one rank makes a chip with one core.

        Raises:
            TopologyError: a count below 1, or ranks that do not fill whole chips and hosts.
        """
        for what, count in (
            ("ranks", ranks),
            ("cores_per_chip", cores_per_chip),
            ("chips_per_host", chips_per_host),
        ):
            if count < 1:
                raise TopologyError(f"{what} must be at least 1, not {count}")
        cores = min(cores_per_chip, ranks)
        if ranks % cores:
            raise TopologyError(f"{ranks} ranks do not divide into chips of {cores} cores")
        per_host = min(chips_per_host, ranks // cores)
        if (ranks // cores) % per_host:
            raise TopologyError(
                f"{ranks} ranks do not divide into hosts of {per_host} chips with {cores} cores"
            )
        across = 2 if per_host % 2 == 0 else 1
        sites = []
        for rank in range(ranks):
            host, chip = divmod(rank // cores, per_host)
            coords = (chip % across, chip // across, host)
            sites.append(Site(host, coords[::-1], rank % cores, coords))
        bounds = (across, per_host // across, ranks // (cores * per_host))
        name = f"virtual:{'x'.join(map(str, bounds))} with {cores} cores a chip"
        return cls(name, number(sites), Grid(bounds, (False, False, False)))

    def first(self, ranks: int) -> Topology:
        """The topology of the first ranks, which keep their numbers and the chip network.

        Raises:
            TopologyError: a count that is not 1..``ranks`` or that splits chips or hosts unevenly.
        """
        if not 1 <= ranks <= self.ranks:
            raise TopologyError(f"cannot take {ranks} of the {self.ranks} ranks of {self.name}")
        devices = None if self.jax_devices is None else self.jax_devices[:ranks]
        return replace(self, places=self.places[:ranks], jax_devices=devices)

    @cached_property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.places)

    @cached_property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.places[-1].host + 1

    @cached_property
    def chips(self) -> int:
        """Number of chips."""
        return self.places[-1].chip + 1

    @property
    def cores_per_chip(self) -> int:
        """Ranks of one chip."""
        return self.ranks // self.chips

    @property
    def ranks_per_host(self) -> int:
        """Ranks of one host, the number of lanes."""
        return self.ranks // self.hosts

    def place(self, rank: int) -> Place:
        """Where a rank sits.

        Raises:
            TopologyError: not a rank of this topology.
        """
        if not 0 <= rank < self.ranks:
            raise TopologyError(f"rank {rank} is outside 0..{self.ranks - 1} of {self.name}")
        return self.places[rank]

    def groups(self, by: GroupBy) -> tuple[tuple[int, ...], ...]:
        """All ranks, partitioned by what they share; groups and ranks in rising order.

        ``all``: one group. ``chip``: the cores of one chip. ``core``: one core of each chip of a
        host. ``host``: the ranks of one host. ``lane``: one rank of each host.

        Raises:
            TopologyError: an unknown partition.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(self.places):
            found.setdefault(_shared(place, by), []).append(rank)
        return tuple(tuple(group) for group in found.values())

    def group(self, rank: int, by: GroupBy) -> tuple[int, ...]:
        """The ranks, ``rank`` included, that share what :meth:`groups` describes with it."""
        shared = _shared(self.place(rank), by)
        return tuple(r for r, place in enumerate(self.places) if _shared(place, by) == shared)

    def hops(self, a: int, b: int) -> int:
        """Chip-to-chip links between two ranks; 0 on the same chip."""
        start, end = self.place(a), self.place(b)
        if start.chip == end.chip:
            return 0
        if self.grid is None or start.coords is None or end.coords is None:
            return 1
        return self.grid.hops(start.coords, end.coords)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Ranks at most one hop away, ``rank`` itself excluded, nearest first."""
        near = [(self.hops(rank, r), r) for r in range(self.ranks) if r != rank]
        return tuple(r for hops, r in sorted(near) if hops <= 1)

    def devices(self) -> tuple[jax.Device, ...]:
        """Devices in rank order.

        Those that were given; for a slice name, compile-only devices from libtpu; for a virtual
        topology, the first CPU devices.

        Raises:
            TopologyError: too few CPU devices, or libtpu does not know the slice.
            RuntimeError: libtpu is missing or refuses to load; the message says what to do.
        """
        from tpu_collectives import lookup

        if self.jax_devices is not None:
            return self.jax_devices
        if self.name.partition(":")[0] in GENERATIONS:
            keys = [(place.coords, place.core) for place in self.places]
            return lookup.compile_only_devices(self.name, keys)
        return lookup.cpu_devices(self.ranks)

    def mesh(self, axis: str = "ranks") -> jax.sharding.Mesh:
        """A mesh with one axis whose index is the rank."""
        from jax.sharding import Mesh

        return Mesh(np.array(self.devices()), (axis,))

    def describe(self) -> str:
        """A summary line and a table of ranks, for people."""
        lines = [
            f"{self.name}: {self.ranks} ranks, {self.hosts} hosts, {self.chips} chips,"
            f" {self.cores_per_chip} cores a chip",
            "rank  host  lane  chip  core  coords",
        ]
        for rank, place in enumerate(self.places):
            coords = "-" if place.coords is None else ",".join(map(str, place.coords))
            numbers = (rank, place.host, place.lane, place.chip, place.core)
            lines.append("  ".join(f"{value:4}" for value in numbers) + f"  {coords}")
        return "\n".join(lines)


def _shared(place: Place, by: GroupBy) -> tuple[int, ...]:
    match by:
        case "all":
            return ()
        case "chip":
            return (place.chip,)
        case "core":
            return (place.host, place.core)
        case "host":
            return (place.host,)
        case "lane":
            return (place.lane,)
    raise TopologyError(f"no partition {by!r}; use all, chip, core, host or lane")


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")


def _check_devices(devices: Sequence[jax.Device]) -> None:
    if not devices:
        raise TopologyError("a topology needs at least one device")
    repeated = [str(device) for device, n in Counter(devices).items() if n > 1]
    if repeated:
        raise TopologyError(f"a device can be one rank only; listed twice: {', '.join(repeated)}")
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        raise TopologyError(f"devices must be of one kind, not {' and '.join(kinds)}")
