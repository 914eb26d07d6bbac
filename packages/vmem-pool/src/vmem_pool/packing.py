"""The bytes of a matrix inside a ``uint8 [rows, 128]`` pool, written and read on the host.

A matrix is cut into panels of 128 lanes, one after another; a panel's rows are padded to the full
tile. Inside a panel one 32-bit word row holds 1, 2, 4 or 8 consecutive matrix rows, low bits first,
and a byte row is one byte of each lane, lowest first::

    f32  [K, 256] -> panel 0: row 0 bytes 0, 1, 2, 3; row 1 ...    panel 1: ...
    bf16 [K, 256] -> panel 0: row 0 low, row 0 high; row 1 low ... panel 1: ...
    int4 [K, 256] -> panel 0: rows 0 (low half) and 1 together ... panel 1: ...

This is what :mod:`vmem_pool.views` reads in a kernel, so packed weights can be copied into a window
of the pool by a plain linear DMA.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from vmem_pool.errors import PlanError
from vmem_pool.tiling import LANES, Shape, bits_of, padded_bytes, padded_shape

__all__ = ["pack", "panel_from_bytes", "panel_to_bytes", "unpack"]


def panel_to_bytes(panel: np.ndarray) -> np.ndarray:
    """[K, 128] of any dtype to ``uint8 [K · bits / 8, 128]``; K fills whole bytes."""
    bits = bits_of(panel.dtype)
    if bits < 8:
        # NumPy gives small elements a byte each, with their value in the low bits.
        parts = np.ascontiguousarray(panel).view(np.uint8) & ((1 << bits) - 1)
        grouped = parts.reshape(-1, 8 // bits, LANES)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        return np.bitwise_or.reduce(grouped << shifts, axis=1)
    whole = np.ascontiguousarray(panel).view(np.uint8).reshape(-1, LANES, bits // 8)
    return whole.transpose(0, 2, 1).reshape(-1, LANES)


def panel_from_bytes(rows: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """The inverse of :func:`panel_to_bytes`."""
    kind, bits = np.dtype(dtype), bits_of(dtype)
    if bits < 8:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        parts = rows[:, None, :] >> shifts & ((1 << bits) - 1)
        if np.issubdtype(kind, np.unsignedinteger) or not kind.name.startswith("int"):
            return parts.reshape(-1, LANES).astype(np.uint8).view(kind)
        sign = 1 << (bits - 1)
        return ((parts.astype(np.int8) ^ sign) - sign).reshape(-1, LANES).astype(kind)
    parts = rows.reshape(-1, bits // 8, LANES).transpose(0, 2, 1)
    return np.ascontiguousarray(parts).view(kind)[..., 0]


def pack(array: ArrayLike) -> np.ndarray:
    """The pool's bytes of an array, padding zero: ``uint8 [padded bytes / 128, 128]``.

    Raises:
        PlanError: fewer than two dimensions, or a dtype that VMEM does not hold.
    """
    values = np.asarray(array)
    padded = padded_shape(values.shape, values.dtype)
    wide = np.zeros(padded, values.dtype)
    wide[tuple(slice(size) for size in values.shape)] = values
    matrices = wide.reshape(-1, *padded[-2:])
    panels = [
        panel_to_bytes(matrix[:, lane : lane + LANES])
        for matrix in matrices
        for lane in range(0, padded[-1], LANES)
    ]
    return np.concatenate(panels)


def unpack(rows: ArrayLike, shape: Shape, dtype: DTypeLike) -> np.ndarray:
    """The inverse of :func:`pack`.

    Raises:
        PlanError: the bytes are not those of an array of this shape and dtype.
    """
    stored = np.asarray(rows)
    padded = padded_shape(shape, dtype)
    expected = (padded_bytes(shape, dtype) // LANES, LANES)
    if stored.shape != expected or stored.dtype != np.uint8:
        raise PlanError(
            f"{np.dtype(dtype)} {shape} is stored as uint8 {expected}, not {stored.dtype}"
            f" {stored.shape}"
        )
    panels = stored.reshape(-1, padded[-1] // LANES, expected[0] // _panels(padded), LANES)
    matrices = [
        np.concatenate([panel_from_bytes(panel, dtype) for panel in matrix], axis=1)
        for matrix in panels
    ]
    whole = np.stack(matrices).reshape(padded)
    return whole[tuple(slice(size) for size in shape)]


def _panels(padded: Shape) -> int:
    return int(np.prod(padded[:-2], dtype=int)) * padded[-1] // LANES
