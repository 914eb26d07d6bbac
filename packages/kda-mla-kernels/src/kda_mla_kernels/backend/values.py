"""Values of the host as the programs take them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

__all__ = ["as_i32", "ids"]


def as_i32(values: Any, name: str = "value") -> np.ndarray:
    """Host integers as i32, the only integer type that the programs take.

    Raises:
        ValueError: something else than integers, lists of unequal lengths, or beyond 32 bits.
    """
    try:
        found = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must hold lists of equal length") from None
    if found.size and found.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers of at most 64 bits, not {values!r}")
    limits = np.iinfo(np.int32)
    if found.size and (found.min() < limits.min or found.max() > limits.max):
        raise ValueError(f"{name} holds an integer beyond 32 bits")
    return found.astype(np.int32)


def ids(values: Any) -> jax.Array | np.ndarray:
    """Passes device values through and makes host values i32."""
    return values if isinstance(values, jax.Array) else as_i32(values)
