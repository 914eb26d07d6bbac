"""The weights of a step in the order in which the kernel reads them.

A layer is two segments of the stream: its mixer (KDA or MLA) and its feed-forward part (dense or
mixture of experts); the head is the last. Routed experts are not in it: which ones a step reads is
not known before.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kda_mla_kernels.backend.stream import deepest_stream
from vmem_pool.stream import Matrix, StreamPlan
from vmem_pool.tiling import LANES

from megakernel_kimi.layout import KimiLayout

__all__ = ["head_columns", "key_up", "stream_plan", "value_up"]


def head_columns(layout: KimiLayout) -> int:
    """Columns of the head on one rank, in whole tiles of lanes."""
    return -(-layout.vocab_rows // LANES) * LANES


def key_up(head: int) -> str:
    """Name of what absorbs one head's queries."""
    return f"key_up_{head}"


def value_up(head: int) -> str:
    """Name of what expands one head's latents."""
    return f"value_up_{head}"


def segments(layout: KimiLayout, dtype: Any) -> dict[str, list[Matrix]]:
    """The matrices of each kind of segment, in the order of their use."""
    config = layout.config
    hidden, heads = config.hidden_size, range(layout.mla_heads)
    latent, wide = config.kv_lora_rank, layout.kda_width

    def matrix(name: str, rows: int, columns: int) -> Matrix:
        return Matrix(name, (rows, columns), dtype)

    def gated(channels: int) -> list[Matrix]:
        return [matrix("gate_up", hidden, 2 * channels), matrix("down", channels, hidden)]

    return {
        "kda": [
            matrix("front", hidden, 4 * wide + config.kda_head_dim),
            matrix("rate", config.kda_head_dim, wide),
            matrix("out", wide, hidden),
        ],
        "mla": [
            matrix("front", hidden, layout.query_columns + layout.row_columns),
            matrix("gate", hidden, layout.value_width),
            matrix("query", config.q_lora_rank, layout.mla_heads * config.qk_head_dim),
            *(matrix(key_up(head), config.qk_nope_head_dim, latent) for head in heads),
            *(matrix(value_up(head), latent, config.v_head_dim) for head in heads),
            matrix("out", layout.value_width, hidden),
        ],
        "dense": gated(layout.dense_channels),
        "moe": [
            matrix("front", hidden, layout.latent_columns + layout.router_columns),
            *gated(layout.shared_channels),
            matrix("up", config.routed_expert_hidden_size, layout.hidden_columns),
        ],
        "head": [matrix("head", hidden, head_columns(layout))],
    }


def order(layout: KimiLayout) -> list[str]:
    """The segments of a step."""
    config = layout.config
    dense = set(config.dense_layers)
    names = []
    for layer, kind in enumerate(config.layer_kinds):
        names += [kind, "dense" if layer in dense else "moe"]
    return [*names, "head"]


@cache
def stream_plan(layout: KimiLayout, dtype: Any) -> StreamPlan:
    """The stream in the deepest ring that may be wanted.

    Raises:
        ConfigError: some matrix is too large for any slot of the ring.
    """
    return deepest_stream(segments(layout, dtype), order(layout))
