"""Reading one tensor, or a slice of it, from its file.

Whole runs of bytes are read straight into the result. Where a selection leaves gaps inside rows the
file is mapped, block by block, so that neither the bytes between are read (beyond the pages they
share) nor more than one block is mapped at a time.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from typing import BinaryIO, TypeAlias

import numpy as np

from kda_mla_kernels.checkpoint.dtypes import FLOAT4
from kda_mla_kernels.checkpoint.header import TensorInfo
from kda_mla_kernels.errors import CheckpointError

__all__ = ["Index", "read_tensor"]

Index: TypeAlias = slice | tuple[slice, ...]

BLOCK_BYTES = 64 << 20
"""Most bytes that are mapped at once; far above the cost of a mapping, far below a large tensor."""


def read_tensor(info: TensorInfo, index: Index | None = None) -> np.ndarray:
    """A new array of ``info.dtype`` with the selected elements; see :meth:`Checkpoint.read`."""
    ranges = _ranges(info, index)
    if info.dtype == FLOAT4:
        return _read_float4(info, ranges)
    return _read_words(info, info.shape, ranges, info.dtype.itemsize).view(info.dtype)


def _ranges(info: TensorInfo, index: Index | None) -> tuple[range, ...]:
    """One range per axis.

    A bound beyond its axis is an error, where NumPy would clamp it: a shard that is smaller than
    asked for is a mistake in the layout.
    """
    slices = () if index is None else (index,) if isinstance(index, slice) else tuple(index)
    if len(slices) > len(info.shape):
        raise IndexError(
            f"{len(slices)} slices for tensor {info.name!r} of shape {list(info.shape)}"
        )
    slices += (slice(None),) * (len(info.shape) - len(slices))
    for axis, (part, extent) in enumerate(zip(slices, info.shape)):
        if not isinstance(part, slice):
            raise TypeError(f"axis {axis} of tensor {info.name!r} needs a slice, not {part!r}")
        if part.step is not None and part.step < 1:
            raise IndexError(
                f"slice step {part.step} on axis {axis} of {info.name!r} must be at least 1"
            )
        bounds = [bound for bound in (part.start, part.stop) if bound is not None]
        if any(not -extent <= bound <= extent for bound in bounds):
            raise IndexError(
                f"slice {part.start}:{part.stop} exceeds axis {axis} of tensor {info.name!r},"
                f" which has {extent} entries"
            )
    return tuple(range(*part.indices(extent)) for part, extent in zip(slices, info.shape))


def _read_float4(info: TensorInfo, ranges: tuple[range, ...]) -> np.ndarray:
    """Reads the bytes that cover the selection, then splits them into elements."""
    *outer, last = ranges
    first = last.start // 2
    covering = range(first, max(first, (last[-1] // 2 + 1) if len(last) else first))
    packed = _read_words(info, (*info.shape[:-1], info.shape[-1] // 2), (*outer, covering), 1)
    elements = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 0xF, out=elements[..., 0::2])
    np.right_shift(packed, 4, out=elements[..., 1::2])
    start = last.start - 2 * first
    picked = elements[..., start : start + len(last) * last.step : last.step]
    return np.ascontiguousarray(picked).view(FLOAT4)


def _read_words(
    info: TensorInfo, shape: tuple[int, ...], ranges: tuple[range, ...], itemsize: int
) -> np.ndarray:
    """The selection as unsigned words of ``itemsize`` bytes."""
    words = np.empty([len(part) for part in ranges], f"<u{itemsize}")
    if words.size == 0:
        return words
    try:
        with info.file.open("rb") as stream:
            end, size = info.offset + info.bytes, os.fstat(stream.fileno()).st_size
            if end > size:
                raise CheckpointError(
                    f"{info.file} was truncated after it was opened: tensor {info.name!r} ends at"
                    f" byte {end}, the file has {size}"
                )
            _fill(words, stream, info.offset, shape, ranges)
    except OSError as error:
        raise CheckpointError(
            f"tensor {info.name!r} cannot be read from {info.file}: {error.strerror or error}"
        ) from error
    return words


def _fill(
    target: np.ndarray,
    stream: BinaryIO,
    offset: int,
    shape: Sequence[int],
    ranges: Sequence[range],
) -> None:
    """Copies the part of an array at ``offset`` that ``ranges`` select into ``target``."""
    if not shape:
        _read_run(target, stream, offset)
        return
    rows, inner = ranges[0], ranges[1:]
    row_bytes = math.prod(shape[1:]) * target.itemsize
    if rows.step == 1 and all(part == range(extent) for part, extent in zip(inner, shape[1:])):
        _read_run(target, stream, offset + rows.start * row_bytes)
    elif row_bytes > BLOCK_BYTES and len(shape) > 1:
        for place, row in enumerate(rows):
            _fill(target[place], stream, offset + row * row_bytes, shape[1:], inner)
    else:
        per_block = max(1, BLOCK_BYTES // (row_bytes * rows.step))
        for place in range(0, len(rows), per_block):
            block = rows[place : place + per_block]
            source = _mapped(stream, offset + block.start * row_bytes, block, shape[1:], target)
            picks = tuple(slice(part.start, part.stop, part.step) for part in inner)
            target[place : place + per_block] = source[(slice(None, None, block.step), *picks)]


def _read_run(target: np.ndarray, stream: BinaryIO, offset: int) -> None:
    wanted = target.reshape(-1).view(np.uint8).data
    stream.seek(offset)
    while wanted:
        count = stream.readinto(wanted)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{stream.name} ended while it was being read")
        wanted = wanted[count:]


def _mapped(
    stream: BinaryIO, offset: int, rows: range, row_shape: Sequence[int], like: np.ndarray
) -> np.ndarray:
    """A view of the file from the first to the last of ``rows``; unmapped with its last user."""
    count = rows[-1] - rows[0] + 1
    lead = offset % mmap.ALLOCATIONGRANULARITY
    length = lead + count * math.prod(row_shape) * like.itemsize
    pages = mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_READ, offset=offset - lead)
    flat = np.frombuffer(pages, like.dtype, count * math.prod(row_shape), lead)
    return flat.reshape(count, *row_shape)
