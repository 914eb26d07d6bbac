"""Checks of sizes that all collectives share, made before anything is traced."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tpu_collectives.errors import CollectiveError
from tpu_collectives.steps import LANES

__all__ = ["WIRE_DTYPES", "check_block", "check_lanes", "check_wire"]

WIRE_DTYPES = ("bfloat16", "float32")


def check_block(rows: int, width: int) -> None:
    """Refuse empty blocks.

    Raises:
        CollectiveError: rows or width below 1.
    """
    for what, count in (("rows", rows), ("width", width)):
        if count < 1:
            raise CollectiveError(f"{what} must be at least 1, not {count}")


def check_wire(dtype: Any) -> None:
    """Refuse types that do not travel.

    Raises:
        CollectiveError: not bfloat16 or float32.
    """
    name = jnp.dtype(dtype).name
    if name not in WIRE_DTYPES:
        raise CollectiveError(f"the wire carries {' or '.join(WIRE_DTYPES)}, not {name}")


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
