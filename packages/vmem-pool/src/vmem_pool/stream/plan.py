"""The weights of a step as one stream of equal slots, planned without touching a device.

A *segment* is a fixed list of matrices in the order in which a kernel consumes them, say those of
one kind of layer; a step is a list of segments. In HBM the stream is one array
``uint8 [slots, rows, 128]`` in consumption order. A segment fills whole slots, so that a layer of
any kind can follow one of any other, and what is loaded after slot ``pos`` is always slot
``pos + depth``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from vmem_pool.errors import PlanError
from vmem_pool.stream.tiles import Matrix, Tile, cuttings
from vmem_pool.tiling import LANES, TILE_BYTES

__all__ = ["Segment", "StreamPlan", "choose_slot_bytes", "plan_stream"]

SATURATING_BYTES = 16 << 20
"""In flight, these keep a TPU v7's HBM busy beside matrix work (published measurement)."""
SLOT_STEP_BYTES = 4 * TILE_BYTES
"""Slot sizes that are tried differ by this."""
MOST_SLOTS = 1 << 14
"""Of a step: up to here, places in a ring of any depth are computed exactly."""
TILE_COST = 1 / 32
"""Slots of padding that are worth avoiding one more tile, whose dot fills and drains the MXU."""


@dataclass(frozen=True)
class Segment:
    """Tiles of a segment in consumption order; ``num_slots`` slots hold them."""

    name: str
    tiles: tuple[Tile, ...]

    @property
    def num_slots(self) -> int:
        """Slots from the first to the last tile."""
        return self.tiles[-1].slot + 1

    @property
    def bytes(self) -> float:
        """Bytes of the matrices without padding."""
        return sum(matrix.bytes for matrix in self.matrices)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """In consumption order."""
        return tuple({tile.matrix.name: tile.matrix for tile in self.tiles}.values())

    @cached_property
    def tiles_in_slot(self) -> Mapping[int, int]:
        """How many tiles share each slot."""
        return Counter(tile.slot for tile in self.tiles)

    def of(self, name: str) -> tuple[Tile, ...]:
        """The tiles of one matrix.

        Raises:
            PlanError: no such matrix.
        """
        found = tuple(tile for tile in self.tiles if tile.matrix.name == name)
        if not found:
            known = ", ".join(matrix.name for matrix in self.matrices)
            raise PlanError(f"segment {self.name} has no matrix {name!r} (it has: {known})")
        return found


@dataclass(frozen=True)
class StreamPlan:
    """Which slot holds what. Made by :func:`plan_stream`.

    Attributes:
        segments: every kind once, by name.
        order: names of the segments of a step.
        slot_bytes: of each slot, a multiple of 4096.
        depth: slots of the ring in VMEM.
    """

    segments: Mapping[str, Segment]
    order: tuple[str, ...]
    slot_bytes: int
    depth: int

    @property
    def slot_rows(self) -> int:
        """Rows of a slot as ``uint8 [rows, 128]``."""
        return self.slot_bytes // LANES

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First slot of each segment of the order."""
        return tuple(accumulate((self.segments[n].num_slots for n in self.order), initial=0))[:-1]

    @cached_property
    def num_slots(self) -> int:
        """Slots of a step."""
        return sum(self.segments[name].num_slots for name in self.order)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of the stream in HBM; its dtype is uint8."""
        return self.num_slots, self.slot_rows, LANES

    @property
    def bytes(self) -> int:
        """What a step reads from HBM, padding included."""
        return self.num_slots * self.slot_bytes

    @property
    def payload_bytes(self) -> float:
        """Bytes of all matrices of a step without padding."""
        return sum(self.segments[name].bytes for name in self.order)

    @property
    def ring_bytes(self) -> int:
        """VMEM of the ring."""
        return self.depth * self.slot_bytes

    @property
    def saturates_hbm(self) -> bool:
        """Whether the ring has the 16 MiB that keep a TPU v7's HBM busy."""
        return self.ring_bytes >= SATURATING_BYTES

    def ring_slot(self, pos: Any) -> Any:
        """``pos mod depth``, for an ``int`` or a traced int32 in 0..num_slots - 1."""
        if isinstance(pos, int | np.integer):
            return int(pos) % self.depth
        if self.depth & (self.depth - 1) == 0:
            return pos & (self.depth - 1)
        factor, shift = self._reciprocal
        return pos - self.depth * ((pos * factor) >> shift)

    @cached_property
    def _reciprocal(self) -> tuple[int, int]:
        """``f`` and ``s`` so that ``pos f >> s`` is ``pos // depth`` in int32, since the scalar
        unit does not divide."""
        # Exact while pos (f depth - 2**s) < 2**s, and f depth - 2**s is below the depth.
        fits = (2**31 // self.num_slots) * self.depth
        shift = min(fits.bit_length() - 2, 30)
        return -(-(1 << shift) // self.depth), shift

    def positions(self, name: str) -> tuple[int, ...]:
        """First slots of all segments of one kind."""
        return tuple(at for at, kind in zip(self.starts, self.order) if kind == name)


def plan_stream(
    segments: Mapping[str, Sequence[Matrix]],
    order: Sequence[str],
    *,
    slot_bytes: int,
    depth: int,
) -> StreamPlan:
    """Cuts the matrices into tiles and puts them into slots, in order.

    A matrix is cut along the dimension that wastes least; tiles that do not fill a slot share it
    with their neighbours in the order. What is left in a slot is zero and is never multiplied.

    Args:
        segments: the matrices of each kind of segment, in the order in which they are consumed.
        order: the kinds of a step, first to last.
        slot_bytes: see :func:`choose_slot_bytes`; 2 to 3 MB is a good size for large models.
        depth: slots of the ring; a power of two saves a few scalar instructions per slot.

    Raises:
        PlanError: a slot size that is not in whole tiles, a depth below 1, an empty or unknown
            segment, a name that is used twice, a matrix that fits no slot, or more slots than
            :data:`MOST_SLOTS`.
    """
    if not isinstance(slot_bytes, int | np.integer) or slot_bytes < 1 or slot_bytes % TILE_BYTES:
        raise PlanError(f"a slot has a multiple of {TILE_BYTES} bytes, not {slot_bytes!r}")
    if isinstance(depth, bool) or not isinstance(depth, int | np.integer) or depth < 1:
        raise PlanError(f"the depth of a ring is a whole number of at least 1, not {depth!r}")
    unknown = [name for name in order if name not in segments]
    if unknown or not order:
        known = ", ".join(segments)
        raise PlanError(f"the order names {unknown or 'no segment'} (segments: {known})")
    planned = {name: _pack(name, segments[name], slot_bytes) for name in dict.fromkeys(order)}
    plan = StreamPlan(planned, tuple(order), slot_bytes, depth)
    if plan.num_slots > MOST_SLOTS:
        raise PlanError(
            f"a step has at most {MOST_SLOTS} slots, not {plan.num_slots}; take larger slots"
        )
    return plan


def choose_slot_bytes(
    segments: Mapping[str, Sequence[Matrix]],
    order: Sequence[str],
    smallest: int = 1 << 20,
    largest: int = 3 << 20,
) -> int:
    """The slot size for which a step reads least, and of equals the largest.

    Raises:
        PlanError: some matrix fits no slot of at most ``largest`` bytes.
    """
    best: tuple[int, int] | None = None
    sizes = range(-(-smallest // SLOT_STEP_BYTES) * SLOT_STEP_BYTES, largest + 1, SLOT_STEP_BYTES)
    problem: PlanError | None = None
    for size in reversed(sizes):
        try:
            total = plan_stream(segments, order, slot_bytes=size, depth=1).bytes
        except PlanError as error:
            problem = problem or error
            continue
        if best is None or total < best[0]:
            best = total, size
    if best is None:
        raise problem or PlanError(f"no slot size between {smallest} and {largest} bytes")
    return best[1]


def _pack(name: str, matrices: Sequence[Matrix], slot_bytes: int) -> Segment:
    if not matrices:
        raise PlanError(f"segment {name} has no matrices")
    repeated = [n for n, times in Counter(m.name for m in matrices).items() if times > 1]
    if repeated:
        raise PlanError(f"segment {name} has matrix {', '.join(repeated)} twice")
    tiles: list[Tile] = []
    used = 0
    for matrix in matrices:
        free = -used % slot_bytes
        best: tuple[float, list[Tile], int] | None = None
        for cutting in cuttings(matrix, free, slot_bytes):
            placed, end = _place(cutting, used, slot_bytes)
            cost = end + len(placed) * TILE_COST * slot_bytes
            if best is None or cost < best[0]:
                best = cost, placed, end
        assert best is not None
        tiles += best[1]
        used = best[2]
    crowd = Counter(tile.slot for tile in tiles)
    return Segment(name, tuple(replace(t, alone=crowd[t.slot] == 1) for t in tiles))


def _place(tiles: Sequence[Tile], used: int, slot_bytes: int) -> tuple[list[Tile], int]:
    """Puts tiles behind ``used`` bytes of a segment; none crosses the end of a slot."""
    placed = []
    for tile in tiles:
        if tile.bytes > slot_bytes - used % slot_bytes:
            used += -used % slot_bytes
        slot, inside = divmod(used, slot_bytes)
        placed.append(replace(tile, slot=slot, byte_row=inside // LANES))
        used += tile.bytes
    return placed, used
