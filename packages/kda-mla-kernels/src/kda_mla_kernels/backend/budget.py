"""The VMEM of a step: what its stages need, and the ring that fits beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
from vmem_pool.stream import StreamPlan
from vmem_pool.stream.plan import SATURATING_BYTES
from vmem_pool.tiling import allocated_bytes

from kda_mla_kernels.errors import ConfigError

__all__ = ["VMEM_LIMIT_BYTES", "buffers", "fit_ring"]

VMEM_LIMIT_BYTES = (64 << 20) - (128 << 10)
"""All of a TPU v7 core's VMEM that the compiler lets a kernel use."""
RESERVE_BYTES = 7 << 20
"""For spills and temporaries, which the compiler adds: up to 5 MiB were seen where VMEM has room
for the whole ring."""
SCARCE_BYTES = 10 << 20
"""The same where it has not, as the other buffers are large: up to 9.2 MiB were seen."""


def buffers(*trees: Any) -> dict[str, int]:
    """Bytes in VMEM of every leaf: scratch, or shapes of operands and results that live there."""
    found: dict[str, int] = {}
    for tree in trees:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            semaphore = isinstance(leaf, pltpu.SemaphoreType)
            if semaphore or getattr(leaf, "memory_space", pltpu.VMEM) != pltpu.VMEM:
                continue
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            found[name] = found.get(name, 0) + allocated_bytes(leaf.shape, leaf.dtype)
    return found


def fit_ring(stream: StreamPlan, others: Mapping[str, int]) -> StreamPlan:
    """The stream with the deepest ring that fits beside other buffers.

    Raises:
        ConfigError: what is left does not hold a ring that keeps HBM busy.
    """
    free = VMEM_LIMIT_BYTES - sum(others.values())
    if stream.ring_bytes <= free - RESERVE_BYTES:
        return stream
    free -= SCARCE_BYTES
    fitted = replace(stream, depth=max(free // stream.slot_bytes, 1))
    if not fitted.saturates_hbm:
        largest = sorted(others.items(), key=lambda item: -item[1])[:4]
        listed = ", ".join(f"{name} ({size / 2**20:.1f} MiB)" for name, size in largest)
        raise ConfigError(
            f"a step of this size leaves {max(free, 0) / 2**20:.1f} MiB of VMEM for the weight"
            f" stream, which needs {SATURATING_BYTES >> 20}; take more ranks, fewer rows or backend"
            f" xla (largest buffers: {listed})"
        )
    return fitted
