"""The element types of safetensors files as NumPy types."""

from __future__ import annotations

import ml_dtypes
import numpy as np

__all__ = ["FLOAT4", "NUMPY_DTYPES", "stored_bytes"]

FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)
"""Stored two to a byte, the element of lower index in the low four bits."""

NUMPY_DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F4": FLOAT4,
}
"""By their names in a header. ``F8_E4M3`` means the finite variant (``fn``), without infinities."""


def stored_bytes(elements: int, dtype: np.dtype) -> int:
    """Bytes that this many elements take in a file."""
    return elements // 2 if dtype == FLOAT4 else elements * dtype.itemsize
