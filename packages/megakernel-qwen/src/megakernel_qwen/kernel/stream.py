"""The weights of a step in the order in which the kernel reads them.

A layer is two segments of the stream: its mixer (of one of two kinds) and its feed-forward layer.
The head is the last segment. What is narrower than a tile of lanes, such as the gates of the delta
net, would cost more padding than payload there and stands in arrays of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kda_mla_kernels.errors import ConfigError
from vmem_pool.errors import PlanError
from vmem_pool.stream import Matrix, StreamPlan, choose_slot_bytes, plan_stream
from vmem_pool.tiling import LANES

from megakernel_qwen.layout import QwenLayout

__all__ = ["head_columns", "stream_plan"]

MIN_SLOT_BYTES = 1 << 20
RING_BYTES = 40 << 20
"""VMEM that the ring may take: a TPU v7 core has 64 MiB, and the deeper the ring, the longer an
exchange may last before HBM idles."""
MAX_DEPTH = 32


def head_columns(layout: QwenLayout) -> int:
    """Columns of the head on one rank, in whole tiles of lanes."""
    return -(-layout.vocab_rows // LANES) * LANES


def segments(layout: QwenLayout, dtype: Any) -> dict[str, list[Matrix]]:
    """The matrices of each kind of segment, in the order of their use."""
    hidden = layout.config.hidden_size
    wide = layout.conv_channels + layout.value_width
    heads = layout.query_heads * layout.config.head_dim
    return {
        "linear_attention": [
            Matrix("in_proj", (hidden, wide), dtype),
            Matrix("out_proj", (layout.value_width, hidden), dtype),
        ],
        "full_attention": [
            Matrix("in_proj", (hidden, sum(layout.gqa_columns)), dtype),
            Matrix("out_proj", (heads, hidden), dtype),
        ],
        "mlp": [
            Matrix("gate_up", (hidden, 2 * layout.intermediate), dtype),
            Matrix("down", (layout.intermediate, hidden), dtype),
        ],
        "head": [Matrix("head", (hidden, head_columns(layout)), dtype)],
    }


def order(layout: QwenLayout) -> list[str]:
    """The segments of a step."""
    return [name for kind in layout.config.layer_types for name in (kind, "mlp")] + ["head"]


@cache
def stream_plan(layout: QwenLayout, dtype: Any, ring_bytes: int = RING_BYTES) -> StreamPlan:
    """Slots of the size that wastes least, in the deepest ring that fits.

    Raises:
        ConfigError: some matrix is too large for any slot of the ring.
    """
    kinds, names = segments(layout, dtype), order(layout)
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


def _bytes_of_a_step(kinds: dict[str, list[Matrix]], names: list[str]) -> int:
    """Slots of small models need not be as large as those that a long stream wants."""
    return int(sum(matrix.bytes for name in names for matrix in kinds[name])) // MAX_DEPTH
