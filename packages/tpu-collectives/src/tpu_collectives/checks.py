"""Checks of sizes that all collectives share, made before anything is traced."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tpu_collectives.errors import CollectiveError
from tpu_collectives.wire import LANES, lane_unit

__all__ = ["check_block", "check_lanes", "check_payload", "check_wire", "padded"]

WIRE_DTYPES = ("bfloat16", "float32")
PAYLOAD_DTYPES = (*WIRE_DTYPES, "int32")


def check_block(rows: int, width: int) -> None:
    """Refuse empty blocks.

    Raises:
        CollectiveError: rows or width below 1.
    """
    for what, count in (("rows", rows), ("width", width)):
        if count < 1:
            raise CollectiveError(f"{what} must be at least 1, not {count}")


def check_wire(dtype: Any) -> None:
    """Refuse types that sums do not travel in.

    Raises:
        CollectiveError: not bfloat16 or float32.
    """
    _check_dtype(dtype, WIRE_DTYPES)


def check_payload(dtype: Any) -> None:
    """Refuse types that blocks do not travel in.

    Raises:
        CollectiveError: not bfloat16, float32 or int32.
    """
    _check_dtype(dtype, PAYLOAD_DTYPES)


def check_lanes(width: int, of: str) -> None:
    """Refuse widths that cannot be laid side by side.

    Raises:
        CollectiveError: not a multiple of 128.
    """
    if width % LANES:
        wanted = -(-width // LANES) * LANES
        raise CollectiveError(
            f"{of} of {width} columns is not a multiple of {LANES} lanes; pad it to {wanted}"
        )


def padded(rows: int, width: int, dtype: Any) -> int:
    """Columns of a block that stays by itself: whole lane groups."""
    unit = lane_unit(rows, dtype)
    return -(-width // unit) * unit


def _check_dtype(dtype: Any, allowed: tuple[str, ...]) -> None:
    name = jnp.dtype(dtype).name
    if name not in allowed:
        raise CollectiveError(f"the wire carries {' or '.join(allowed)}, not {name}")
