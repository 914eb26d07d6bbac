"""The mesh axis that programs run over, and sums along it."""

from __future__ import annotations

import jax
from jax import lax
from jax.sharding import PartitionSpec

__all__ = ["RANKS", "SPLIT", "WHOLE", "sum_over_ranks"]

RANKS = "ranks"
"""Mesh axis over which everything is split."""

SPLIT, WHOLE = PartitionSpec(RANKS), PartitionSpec()
"""An array with one entry per rank in front; one that every rank has as a whole."""


def sum_over_ranks(partial: jax.Array) -> jax.Array:
    """f32 sum of every rank's partial result."""
    return lax.psum(partial, RANKS)
