"""The bytes of a stream, written on the host slot by slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from vmem_pool.errors import PlanError
from vmem_pool.packing import pack
from vmem_pool.stream.plan import Segment, StreamPlan
from vmem_pool.stream.tiles import Matrix
from vmem_pool.tiling import LANES

__all__ = ["Fetch", "image", "slots"]

Fetch: TypeAlias = Callable[[int, str], ArrayLike]
"""From the number of a segment in the order and a matrix name to the matrix [K, N]."""


def slots(plan: StreamPlan, fetch: Fetch, start: int = 0) -> Iterator[np.ndarray]:
    """Every slot from ``start`` on, as ``uint8 [slot rows, 128]``; a fresh array each.

    At most one matrix is held at a time, and one that ends before ``start`` is never fetched, so
    that an interrupted writer can go on where it stopped.

    Raises:
        PlanError: a fetched matrix of another shape or dtype than planned.
    """
    for number, (first, name) in enumerate(zip(plan.starts, plan.order)):
        segment = plan.segments[name]
        if first + segment.num_slots > start:
            yield from _segment(plan, segment, number, fetch, max(start - first, 0))


def image(plan: StreamPlan, fetch: Fetch) -> np.ndarray:
    """The whole stream, ``uint8 [slots, slot rows, 128]``."""
    return np.stack(list(slots(plan, fetch)))


def _segment(
    plan: StreamPlan, segment: Segment, number: int, fetch: Fetch, skip: int
) -> Iterator[np.ndarray]:
    slot = np.zeros((plan.slot_rows, LANES), np.uint8)
    at, name, whole = skip, "", np.empty(0)
    for tile in segment.tiles:
        if tile.slot < skip:
            continue
        if tile.slot > at:
            yield slot
            slot, at = np.zeros_like(slot), tile.slot
        if tile.matrix.name != name:
            name, whole = tile.matrix.name, _checked(tile.matrix, segment, fetch, number)
        part = whole[tile.rows.start : tile.rows.stop, tile.columns.start : tile.columns.stop]
        packed = pack(part)
        slot[tile.byte_row : tile.byte_row + len(packed)] = packed
    yield slot


def _checked(matrix: Matrix, segment: Segment, fetch: Fetch, number: int) -> np.ndarray:
    found = np.asarray(fetch(number, matrix.name))
    if found.shape != matrix.shape or found.dtype != matrix.dtype:
        raise PlanError(
            f"matrix {matrix.name} of segment {number} ({segment.name}) is planned as"
            f" {matrix.dtype} {matrix.shape}, not {found.dtype} {found.shape}"
        )
    return found
