"""The weights of a step in the order in which the kernel reads them.

A layer is two segments of the stream: its mixer (of one of two kinds) and its feed-forward layer.
The head is the last segment. What is narrower than a tile of lanes, such as the gates of the delta
net, would cost more padding than payload there and stands in arrays of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kda_mla_kernels.backend.stream import deepest_stream
from vmem_pool.stream import Matrix, StreamPlan
from vmem_pool.tiling import LANES

from megakernel_qwen.layout import QwenLayout

__all__ = ["head_columns", "stream_plan"]


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
def stream_plan(layout: QwenLayout, dtype: Any) -> StreamPlan:
    """The stream in the deepest ring that may be wanted.

    Raises:
        ConfigError: some matrix is too large for any slot of the ring.
    """
    return deepest_stream(segments(layout, dtype), order(layout))
