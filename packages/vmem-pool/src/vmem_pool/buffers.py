"""What a kernel declares: buffers with lifetimes, and areas that other ranks write to.

Phases are the steps of a kernel in program order, numbered from 0. Lifetimes include both ends:

- the destination of a DMA is born in the phase that **starts** the copy, not in the one that reads;
- the source of a DMA dies in the phase that **waits** for the copy, not in the one that starts it;
- what a peer writes may be written as early as the fastest peer allows, so it never dies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from vmem_pool.errors import PlanError
from vmem_pool.tiling import Shape, padded_bytes

__all__ = ["Buffer", "Interval", "ReceiveArea"]

Interval: TypeAlias = tuple[int, int]
"""First and last phase, both included. In a loop the first may be the larger: it wraps around."""


@dataclass(frozen=True)
class Buffer:
    """A named array that lives for some phases.

    Args:
        name: unique in a plan.
        shape: rows and lanes last; leading dimensions are stacked matrices.
        dtype: integer or float of at most 32 bits.
        live: first and last phase; (5, 1) means phases 5.. and ..1 of a loop's next iteration.
        transfers: (start, wait) phases of each DMA from or to the buffer; all within ``live``.

    Raises:
        PlanError: an empty name, an impossible shape or dtype, a negative phase, or a transfer
            that starts before the buffer's birth or is waited for after its death.
    """

    name: str
    shape: Shape
    dtype: DTypeLike
    live: Interval
    transfers: tuple[Interval, ...] = ()

    def __post_init__(self) -> None:
        _check_array(self)
        if min(self.live) < 0:
            raise PlanError(f"buffer {self.name} cannot live in phases {_span(self.live)}")
        for start, wait in self.transfers:
            if not _within((start, wait), self.live):
                raise PlanError(
                    f"buffer {self.name} lives in phases {_span(self.live)}, but one of its DMAs"
                    f" is started in phase {start} and waited for in phase {wait}"
                )

    @property
    def bytes(self) -> int:
        """Bytes in whole tiles."""
        return padded_bytes(self.shape, self.dtype)

    def lives_in(self, phase: int) -> bool:
        """Whether the buffer holds its contents in this phase."""
        first, last = self.live
        return first <= phase <= last if first <= last else phase >= first or phase <= last


@dataclass(frozen=True)
class ReceiveArea:
    """An array that peers write to by remote DMA. It lives for the whole kernel.

    A peer may run ahead by as much as the protocol allows, so no phase of this rank says when the
    area is free. Areas stand first in the pool, in declaration order: their offsets are then the
    same on all ranks as long as their declarations are, whatever else a rank needs.

    Raises:
        PlanError: an empty name, or an impossible shape or dtype.
    """

    name: str
    shape: Shape
    dtype: DTypeLike

    def __post_init__(self) -> None:
        _check_array(self)

    @property
    def bytes(self) -> int:
        """Bytes in whole tiles."""
        return padded_bytes(self.shape, self.dtype)

    def lives_in(self, phase: int) -> bool:
        """Always."""
        return True


def _check_array(declared: Buffer | ReceiveArea) -> None:
    if not declared.name:
        raise PlanError("a buffer needs a name")
    try:
        object.__setattr__(declared, "dtype", np.dtype(declared.dtype))
        padded_bytes(declared.shape, declared.dtype)
    except (PlanError, TypeError) as error:
        raise PlanError(f"buffer {declared.name}: {error}") from error


def _within(inner: Interval, outer: Interval) -> bool:
    """Whether the phases of ``inner`` follow one another inside ``outer``."""
    (start, wait), (first, last) = inner, outer
    if first <= last:
        return first <= start <= wait <= last
    before_wrap, after_wrap = start >= first, wait <= last
    if before_wrap and after_wrap:
        return True
    return (start >= first and wait >= start) or (start <= wait <= last)


def _span(interval: Interval) -> str:
    return f"{interval[0]}..{interval[1]}"
