"""How one matrix is cut into tiles that fill slots, and where its padding is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from vmem_pool.errors import PlanError
from vmem_pool.tiling import LANES, bits_of, padded_bytes, padded_shape

__all__ = ["Cut", "Matrix", "Span", "Tile", "cuttings"]

ROW_UNIT = 128
"""Tiles cut by rows start at multiples of this: they meet x in whole groups of 128 lanes."""


class Cut(Enum):
    """Along which dimension a matrix [K, N] is cut.

    ``COLUMNS`` gives tiles [K, n], each with finished outputs; ``ROWS`` gives tiles [k, N], whose
    products are added.
    """

    COLUMNS = 1
    ROWS = 0


@dataclass(frozen=True)
class Matrix:
    """A matrix of a segment.

    Args:
        name: unique in its segment.
        shape: (K, N), contraction first, since weights with N minor load fastest.
        dtype: integer or float of at most 32 bits.
        cut: how to cut it, or None for whatever wastes least.

    Raises:
        PlanError: no name, other than two dimensions, or a dtype that VMEM does not hold.
    """

    name: str
    shape: tuple[int, int]
    dtype: DTypeLike
    cut: Cut | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise PlanError("a matrix needs a name")
        if len(self.shape) != 2:
            raise PlanError(f"matrix {self.name} is [K, N], not of shape {self.shape}")
        try:
            object.__setattr__(self, "dtype", np.dtype(self.dtype))
            padded_shape(self.shape, self.dtype)
        except (PlanError, TypeError) as error:
            raise PlanError(f"matrix {self.name}: {error}") from error

    @property
    def bytes(self) -> float:
        """Bytes without padding."""
        return self.shape[0] * self.shape[1] * bits_of(self.dtype) / 8


@dataclass(frozen=True)
class Span:
    """Consecutive rows or columns of a matrix; in a kernel the start may be a traced int32."""

    start: Any
    size: int

    @property
    def stop(self) -> Any:
        """One past the last."""
        return self.start + self.size


@dataclass(frozen=True)
class Tile:
    """A rectangle of a matrix, inside one slot.

    Attributes:
        matrix: what it is a part of.
        cut: how the matrix was cut.
        rows, columns: the rectangle, without padding.
        slot: number within the segment.
        byte_row: first row of the slot's ``uint8 [rows, 128]``, a multiple of 32.
        alone: nothing else stands in its slot.
    """

    matrix: Matrix
    cut: Cut
    rows: Span
    columns: Span
    slot: int = 0
    byte_row: int = 0
    alone: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(k, n) without padding."""
        return self.rows.size, self.columns.size

    @property
    def bytes(self) -> int:
        """Bytes in whole tiles of the memory."""
        return padded_bytes(self.shape, self.matrix.dtype)


def cuttings(matrix: Matrix, free: int, slot_bytes: int) -> Iterator[list[Tile]]:
    """The ways to cut a matrix when its first slot has ``free`` bytes left.

    Each way is: perhaps a piece that fills those bytes, tiles as large as a slot, perhaps a rest.

    Raises:
        PlanError: a matrix that fits no slot in any allowed way.
    """
    found = False
    if padded_bytes(matrix.shape, matrix.dtype) <= slot_bytes:
        found = True
        yield [_tile(matrix, matrix.cut or Cut.COLUMNS, 0, max(matrix.shape))]
    for cut in Cut if matrix.cut is None else (matrix.cut,):
        length, unit, unit_bytes = _units(matrix, cut)
        units, per_slot = ceil(length / unit), slot_bytes // unit_bytes
        if not per_slot or units == 1:
            continue
        found = True
        for first in {0, min(free // unit_bytes, units)}:
            ends = [first, *range(first + per_slot, units, per_slot), units]
            starts = [0, *ends[:-1]]
            yield [_tile(matrix, cut, a * unit, b * unit) for a, b in zip(starts, ends) if a < b]
    if not found:
        least = min(_units(matrix, cut)[2] for cut in Cut if matrix.cut in (None, cut))
        raise PlanError(
            f"matrix {matrix.name} {matrix.shape} {matrix.dtype} needs slots of at least {least}"
            f" bytes, not {slot_bytes}"
        )


def _units(matrix: Matrix, cut: Cut) -> tuple[int, int, int]:
    """Length of the dimension that is cut, the smallest piece of it, and that piece's bytes."""
    rows, columns = matrix.shape
    if cut is Cut.COLUMNS:
        return columns, LANES, padded_bytes((rows, min(LANES, columns)), matrix.dtype)
    return rows, ROW_UNIT, padded_bytes((min(ROW_UNIT, rows), columns), matrix.dtype)


def _tile(matrix: Matrix, cut: Cut, start: int, stop: int) -> Tile:
    rows, columns = (Span(0, size) for size in matrix.shape)
    part = Span(start, min(stop, matrix.shape[cut.value]) - start)
    return Tile(matrix, cut, part, columns) if cut is Cut.ROWS else Tile(matrix, cut, rows, part)
