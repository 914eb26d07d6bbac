"""The weight stream of a decode kernel: the slot size that wastes least, the deepest ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vmem_pool.errors import PlanError
from vmem_pool.stream import Matrix, StreamPlan, choose_slot_bytes, plan_stream

from kda_mla_kernels.errors import ConfigError

__all__ = ["RING_BYTES", "deepest_stream"]

MIN_SLOT_BYTES = 1 << 20
RING_BYTES = 40 << 20
"""VMEM that the ring may take: a TPU v7 core has 64 MiB, and the deeper the ring, the longer an
exchange may last before HBM idles."""
MAX_DEPTH = 32


def deepest_stream(
    kinds: Mapping[str, list[Matrix]], names: Sequence[str], ring_bytes: int = RING_BYTES
) -> StreamPlan:
    """Slots of the size that wastes least, in the deepest ring that fits.

    Args:
        kinds: matrices of each kind of segment, in the order of their use.
        names: the segments of a step, in order.

    Raises:
        ConfigError: some matrix is too large for any slot of the ring.
    """
    used = {name: kinds[name] for name in dict.fromkeys(names)}
    smallest = min(MIN_SLOT_BYTES, _bytes_of_a_step(used, names))
    try:
        slot_bytes = choose_slot_bytes(used, names, smallest)
    except PlanError as error:
        raise ConfigError(f"the weights of this model fit no ring of slots: {error}") from None
    depth = MAX_DEPTH
    while depth > 1 and depth * slot_bytes > ring_bytes:
        depth //= 2
    return plan_stream(used, names, slot_bytes=slot_bytes, depth=depth)


def _bytes_of_a_step(kinds: Mapping[str, list[Matrix]], names: Sequence[str]) -> int:
    """Slots of small models need not be as large as those that a long stream wants."""
    return int(sum(matrix.bytes for name in names for matrix in kinds[name])) // MAX_DEPTH
