"""Parsing and checking the header of one safetensors file.

A file is an 8-byte little-endian header length, a JSON object and the data. The object maps tensor
names to ``dtype``, ``shape`` and ``data_offsets`` (begin and end, counted from the end of the
header); ``__metadata__`` is free text.

The ``safetensors`` library is not used here: its NumPy front end loads neither the 8-bit nor the
4-bit floats, older releases refuse files that contain them at all, and its errors do not say which
file is damaged or what to do. One own path of a few checks serves every type alike; the tests hold
it against the library.

Source: the format description of the safetensors project.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kda_mla_kernels.checkpoint.dtypes import FLOAT4, NUMPY_DTYPES, stored_bytes
from kda_mla_kernels.errors import CheckpointError

__all__ = ["TensorInfo", "read_header"]

MAX_HEADER_BYTES = 100 * 1000 * 1000
"""The format's own limit: a longer header is damage, or an attempt to exhaust memory."""

LENGTH_BYTES = 8
POINTER_START = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a weights file says about one tensor."""

    name: str
    shape: tuple[int, ...]
    """In elements, also for types that are stored packed."""
    dtype: np.dtype
    file: Path
    offset: int
    """First byte in the file."""
    bytes: int
    """Bytes in the file; half the number of elements for ``float4_e2m1fn``."""


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, in the order of its header.

    Raises:
        CheckpointError: the file is missing, a git-lfs pointer, truncated or damaged, or a tensor
            has an unknown type, overlaps another or does not match its shape.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            raw = _header_bytes(file, stream, size)
    except OSError as error:
        raise CheckpointError(
            f"weights file {file} cannot be read: {error.strerror or error}"
        ) from error
    data_start = LENGTH_BYTES + len(raw)
    infos = {
        name: _tensor_info(file, data_start, size, name, entry)
        for name, entry in _parse(file, raw).items()
    }
    _check_overlaps(file, infos)
    return infos


def _header_bytes(file: Path, stream: BinaryIO, size: int) -> bytes:
    prefix = stream.read(len(POINTER_START))
    if prefix == POINTER_START:
        raise CheckpointError(
            f"{file} is a git-lfs pointer, not weights; run 'git lfs pull' in its folder"
        )
    if size < LENGTH_BYTES:
        raise CheckpointError(f"{file} is truncated: {size} bytes cannot hold a safetensors header")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file} is not a safetensors file: its header would have {length} bytes,"
            f" more than the limit of {MAX_HEADER_BYTES}"
        )
    if length > size - LENGTH_BYTES:
        raise CheckpointError(
            f"{file} is truncated: its header has {length} bytes, the file only {size}"
        )
    stream.seek(LENGTH_BYTES)
    return stream.read(length)


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    """The header's entries without the free text."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"the header of {file} names {twice!r} twice")
        return entries

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header of {file} is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(
            f"the header of {file} must be a JSON object, not {type(header).__name__}"
        )
    header.pop("__metadata__", None)
    return header


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _fields(entry: Any) -> tuple[Any, list[int], list[int]] | None:
    """Type name, shape and offsets of an entry, or None if it is malformed."""
    if not isinstance(entry, dict):
        return None
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return None
    if not all(map(_is_count, [*shape, *offsets])):
        return None
    return entry.get("dtype"), shape, offsets


def _tensor_info(file: Path, data_start: int, size: int, name: str, entry: Any) -> TensorInfo:
    where = f"tensor {name!r} in {file}"
    fields = _fields(entry)
    if fields is None:
        raise CheckpointError(f"{where} has no valid dtype, shape and data_offsets")
    dtype_name, shape, (begin, end) = fields
    if not isinstance(dtype_name, str) or dtype_name not in NUMPY_DTYPES:
        raise CheckpointError(
            f"{where} has the unknown dtype {dtype_name!r} (known: {', '.join(NUMPY_DTYPES)})"
        )
    dtype = NUMPY_DTYPES[dtype_name]
    if dtype == FLOAT4 and (not shape or shape[-1] % 2):
        raise CheckpointError(f"{where} is F4 of shape {shape}, whose last axis must be even")
    expected = stored_bytes(math.prod(shape), dtype)
    if end - begin != expected:
        raise CheckpointError(
            f"{where} has data_offsets [{begin}, {end}], but {dtype_name} of shape {shape}"
            f" takes {expected} bytes"
        )
    if data_start + end > size:
        raise CheckpointError(
            f"{where} ends at byte {data_start + end}, but the file has only {size} bytes:"
            " it is truncated"
        )
    return TensorInfo(name, tuple(shape), dtype, file, data_start + begin, expected)


def _check_overlaps(file: Path, infos: dict[str, TensorInfo]) -> None:
    filled = sorted((info for info in infos.values() if info.bytes), key=lambda info: info.offset)
    for one, other in pairwise(filled):
        if one.offset + one.bytes > other.offset:
            raise CheckpointError(f"tensors {one.name!r} and {other.name!r} overlap in {file}")
