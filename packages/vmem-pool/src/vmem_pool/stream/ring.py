"""The ring of a weight stream inside a kernel: take a tile, use it, release it.

Why a slot may be refilled when it is:

- Slot ``pos`` of the stream lives in ring slot ``pos mod depth`` and has that slot's semaphore.
- Its load is started once: by :meth:`Stream.start` for the first ``depth``, else by the release of
  slot ``pos - depth``. So at most one load per ring slot is in flight, and its bytes are the bytes
  that the wait of slot ``pos`` takes.
- A release stands behind all loads of the slot's values in program order; a view that is read after
  its release is refused while tracing.
- Takes follow the plan, which is checked while tracing; a take whose load cannot have been started
  yet, because its ring slot is still held, is refused instead of hanging.
- The last ``depth`` slots start nothing, so no load is left when the kernel ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vmem_pool.errors import StreamError
from vmem_pool.stream.plan import Segment, StreamPlan
from vmem_pool.stream.tiles import Span, Tile
from vmem_pool.tiling import LANES, padded_shape

__all__ = ["Ring", "SegmentReader", "Stream", "TakenTile", "ring_scratch"]

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ring:
    """Scratch of a stream: shapes outside a kernel, references inside.

    Attributes:
        slots: ``uint8 [depth, slot rows, 128]`` in VMEM.
        arrived: one DMA semaphore per slot.
    """

    slots: Any
    arrived: Any


def ring_scratch(plan: StreamPlan) -> Ring:
    """The ring as an entry of ``scratch_shapes``; the kernel gets a :class:`Ring` of references."""
    slots = pltpu.VMEM((plan.depth, plan.slot_rows, LANES), jnp.uint8)
    return Ring(slots, pltpu.SemaphoreType.DMA((plan.depth,)))


class Stream:
    """A planned stream in a kernel.

    Args:
        plan: what stands where.
        ring: the scratch that :func:`ring_scratch` became.
        image: reference to the stream in HBM, ``uint8 [slots, slot rows, 128]``; its memory space
            is ``pltpu.HBM`` or ``pl.ANY``.

    Raises:
        StreamError: a ring or an image that is not of this plan.
    """

    def __init__(self, plan: StreamPlan, ring: Ring, image: Any) -> None:
        shapes = {
            "ring": (ring.slots, (plan.depth, plan.slot_rows, LANES)),
            "image": (image, plan.image_shape),
        }
        for name, (ref, shape) in shapes.items():
            if tuple(ref.shape) != shape or ref.dtype != jnp.uint8:
                raise StreamError(
                    f"the {name} of this plan is uint8 {shape}, not {ref.dtype} {tuple(ref.shape)}"
                )
        self.plan, self.ring, self.image = plan, ring, image

    def start(self) -> None:
        """Starts the first loads. Call it before anything else, also before an entry barrier."""
        for pos in range(min(self.plan.depth, self.plan.num_slots)):
            self._copy(pos).start()

    def segment(self, name: str, pos: Any = 0) -> SegmentReader:
        """Begins to read a segment whose first slot is ``pos``, an ``int`` or traced int32.

        Raises:
            StreamError: no such segment, or none of that kind at a known ``pos``.
        """
        if name not in self.plan.segments:
            known = ", ".join(self.plan.segments)
            raise StreamError(f"the stream has no segment {name!r} (it has: {known})")
        if isinstance(pos, int | np.integer) and pos not in self.plan.positions(name):
            raise StreamError(
                f"no segment {name} starts at slot {pos}; they start at"
                f" {_few(self.plan.positions(name))}"
            )
        return SegmentReader(self, self.plan.segments[name], pos)

    def _copy(self, pos: Any) -> Any:
        """The load of slot ``pos``; starts and waits of the same slot have the same bytes."""
        slot = self.plan.ring_slot(pos)
        return pltpu.make_async_copy(
            self.image.at[pos], self.ring.slots.at[slot], self.ring.arrived.at[slot]
        )

    def _wait(self, pos: Any) -> None:
        self._copy(pos).wait()

    def _refill(self, pos: Any, bounds: tuple[int, int]) -> None:
        """Loads slot ``pos + depth`` into the place of ``pos``, which is within the bounds."""
        depth, end = self.plan.depth, self.plan.num_slots
        if bounds[1] + depth < end:
            self._copy(pos + depth).start()
        elif bounds[0] + depth < end:
            pl.when(pos + depth < end)(lambda: self._copy(pos + depth).start())


@dataclass(eq=False)
class TakenTile:
    """A tile whose bytes have arrived, until its release.

    Attributes:
        tile: as planned; in a rolled loop the first of its run.
        rows, columns: which part of the matrix it is; the start may be traced.
    """

    tile: Tile
    rows: Span
    columns: Span
    _slots: Any
    _ring_slot: Any
    released: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(k, n)."""
        return self.tile.shape

    def load(self) -> jax.Array:
        """The tile [k, n] as a value.

        Raises:
            StreamError: the tile was released, so that its bytes may be on their way out.
        """
        if self.released:
            raise StreamError(f"a tile of {self.tile.matrix.name} is read after its release")
        dtype = jnp.dtype(self.tile.matrix.dtype)
        # One load of all panels: the same instructions, and one touch for an interpreter.
        rows = pl.ds(self.tile.byte_row, self.tile.bytes // LANES)
        stored = self._slots[self._ring_slot, rows, :]
        typed = stored if dtype == jnp.uint8 else pltpu.bitcast(stored, dtype)
        num_panels = padded_shape(self.shape, dtype)[1] // LANES
        wide = jnp.concatenate(jnp.split(typed, num_panels), axis=1)
        return wide[: self.shape[0], : self.shape[1]]


@dataclass(eq=False)
class SegmentReader:
    """Takes the tiles of one segment in the planned order. It exists while tracing only.

    A wait for a load between two dots costs the matrix unit's fill and drain: take two or more
    tiles, then load and multiply, then release. :meth:`each` does so in a rolled loop.
    """

    stream: Stream
    plan: Segment
    pos: Any
    _taken: int = 0
    _arrived: int = 0
    _open: dict[int, int] = field(default_factory=dict)
    _holding: bool = False
    _held: list[int] = field(default_factory=list)

    def take(self, name: str) -> TakenTile:
        """The next tile, which must be one of this matrix; waits for its slot.

        Raises:
            StreamError: the plan has another matrix next, or the load of the slot cannot have been
                started because tiles a ring's length before are not released.
        """
        tile = self._expect(name, 1)[0]
        self._arrive(tile.slot)
        self._taken += 1
        self._open.setdefault(tile.slot, self.plan.tiles_in_slot[tile.slot])
        return self._view(tile, tile.slot, tile.rows, tile.columns)

    def release(self, *tiles: TakenTile) -> None:
        """Gives tiles back; a slot without tiles in use starts its refill.

        Raises:
            StreamError: a tile that was released before, or that :meth:`each` releases.
        """
        for taken in tiles:
            if taken.released:
                raise StreamError(f"a tile of {taken.tile.matrix.name} is released twice")
            slot = taken.tile.slot
            if slot not in self._open:
                raise StreamError(
                    f"a tile of {taken.tile.matrix.name} is released inside each(), which does so"
                    " itself"
                )
            taken.released = True
            self._open[slot] -= 1
            if not self._open[slot]:
                del self._open[slot]
                self._free(slot)

    def each(
        self,
        name: str,
        body: Callable[[Carry, tuple[TakenTile, ...]], Carry],
        init: Carry,
        group: int = 2,
    ) -> Carry:
        """Runs ``body(carry, tiles)`` over all tiles of a matrix, ``group`` slots at a time.

        Tiles of equal shape that fill slots of their own go through a rolled loop, so the code does
        not grow with their number. The body must not release: all waits of a group come before it,
        and all refills after it.

        Raises:
            StreamError: the matrix is not next in the plan.
        """
        if group < 1:
            raise StreamError(f"a group has at least one tile, not {group}")
        tiles = self._expect(name, len(self.plan.of(name)))
        carry, at = init, 0
        while at < len(tiles):
            run = _run(tiles, at)
            if run >= 2 * group and group <= self.stream.plan.depth:
                turns = run // group
                carry = self._loop(tiles[at], group, turns, body, carry)
                at += turns * group
                continue
            group_size = min(group, max(run, 1))
            taken = tuple(self.take(name) for _ in range(group_size))
            carry = body(carry, taken)
            self.release(*taken)
            at += group_size
        return carry

    def hold(self) -> None:
        """From here on releases start no loads, so that urgent transfers go out first."""
        self._holding = True

    def flush(self) -> None:
        """Starts the loads that were held back, in order, and ends :meth:`hold`."""
        self._holding = False
        for slot in self._held:
            self._start(slot, (slot, slot))
        self._held.clear()

    def done(self) -> Any:
        """Ends the segment.

        Returns:
            the first slot of the segment that follows.

        Raises:
            StreamError: tiles that were not taken or released, or loads that are still held back.
        """
        where = f"segment {self.plan.name}"
        if self._taken < len(self.plan.tiles):
            missing = self.plan.tiles[self._taken].matrix.name
            raise StreamError(f"{where} is left before a tile of {missing} is taken")
        if self._open:
            names = {t.matrix.name for t in self.plan.tiles if t.slot in self._open}
            raise StreamError(
                f"{where} is left with unreleased slots of {', '.join(sorted(names))}"
            )
        if self._holding:
            raise StreamError(f"{where} is left while loads are held back; call flush()")
        return self.pos + self.plan.num_slots

    def _expect(self, name: str, count: int) -> tuple[Tile, ...]:
        """The next ``count`` tiles, all of this matrix."""
        tiles = self.plan.tiles[self._taken : self._taken + count]
        wrong = [tile for tile in tiles if tile.matrix.name != name]
        if wrong or len(tiles) < count:
            planned = wrong[0].matrix.name if wrong else "nothing"
            raise StreamError(
                f"segment {self.plan.name} takes {name}, but the plan has {planned} next"
            )
        return tiles

    def _arrive(self, slot: int) -> None:
        if slot < self._arrived:
            return
        before = slot - self.stream.plan.depth
        blocked = [held for held in (*self._open, *self._held) if held <= before]
        if blocked:
            holder = next(t.matrix.name for t in self.plan.tiles if t.slot == blocked[0])
            raise StreamError(
                f"slot {slot} of segment {self.plan.name} would never arrive: the ring of"
                f" {self.stream.plan.depth} slots still holds a tile of {holder}"
            )
        self.stream._wait(self.pos + slot)
        self._arrived = slot + 1

    def _loop(
        self, first: Tile, group: int, turns: int, body: Callable[..., Carry], init: Carry
    ) -> Carry:
        """``turns`` groups of a run that starts with ``first``."""
        stop = first.slot + group * turns

        def turn(number: Any, carry: Carry) -> Carry:
            slots = [first.slot + number * group + member for member in range(group)]
            for slot in slots:
                self.stream._wait(self.pos + slot)
            taken = tuple(self._member(first, slot) for slot in slots)
            carry = body(carry, taken)
            for tile, slot in zip(taken, slots):
                tile.released = True
                if not self._holding:
                    self._start(slot, (first.slot, stop - 1))
            return carry

        self._check_loop(first.slot, stop)
        self._taken += group * turns
        self._arrived = stop
        carry = jax.lax.fori_loop(0, turns, turn, init)
        if self._holding:
            self._held.extend(range(first.slot, stop))
        return carry

    def _check_loop(self, first: int, stop: int) -> None:
        """What :meth:`_arrive` checks, for all slots of a rolled loop."""
        depth = self.stream.plan.depth
        held = [*self._open, *self._held, *([first] if self._holding else [])]
        blocked = [slot for slot in held if slot <= stop - 1 - depth]
        if blocked:
            raise StreamError(
                f"slots up to {stop - 1} of segment {self.plan.name} would never arrive: slot"
                f" {blocked[0]} of the ring of {depth} is still held"
            )

    def _member(self, first: Tile, slot: Any) -> TakenTile:
        """The tile of a run in this slot."""

        def moved(span: Span, axis: int) -> Span:
            if axis != first.cut.value:
                return span
            start = span.start + (slot - first.slot) * span.size
            return Span(pl.multiple_of(start, LANES), span.size)

        return self._view(first, slot, moved(first.rows, 0), moved(first.columns, 1))

    def _view(self, tile: Tile, slot: Any, rows: Span, columns: Span) -> TakenTile:
        ring_slot = self.stream.plan.ring_slot(self.pos + slot)
        return TakenTile(tile, rows, columns, self.stream.ring.slots, ring_slot)

    def _free(self, slot: int) -> None:
        if self._holding:
            self._held.append(slot)
        else:
            self._start(slot, (slot, slot))

    def _start(self, slot: Any, bounds: tuple[int, int]) -> None:
        """Refills a slot of the segment, known to lie within the bounds."""
        known = isinstance(self.pos, int | np.integer)
        starts = (self.pos,) if known else self.stream.plan.positions(self.plan.name)
        lowest, highest = int(min(starts)) + bounds[0], int(max(starts)) + bounds[1]
        self.stream._refill(self.pos + slot, (lowest, highest))


def _run(tiles: tuple[Tile, ...], at: int) -> int:
    """How many tiles from ``at`` on are alone in their slots and of one shape."""
    first = tiles[at]
    stop = at
    while stop < len(tiles) and tiles[stop].alone and tiles[stop].shape == first.shape:
        stop += 1
    return stop - at


def _few(values: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return shown + (", ..." if len(values) > 8 else "")
