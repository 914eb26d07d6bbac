"""What sequences leave behind, per rank.

Letters: R rows, L context slots, W convolution taps, C channels, Hv value heads, K key dim,
V value dim, G key/value heads, D head dim; Nl linear layers, Nf full-attention layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from kda_mla_kernels.backend import DeltaCaches

from megakernel_qwen.layout import QwenLayout

__all__ = ["Caches", "cache_shapes"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Caches(DeltaCaches):
    """The state of all rows on one rank: arrays, or their shapes before they exist.

    ``tail`` is [Nl, R, tail rows, C] and ``delta`` f32 [Nl, R, Hv, K, V].
    """

    keys: Any
    """[Nf, R, G, D, L] normed and rotated, as columns"""
    values: Any
    """[Nf, R, G, L, D]"""

    @property
    def slots(self) -> int:
        """L."""
        return self.keys.shape[-1]

    def position_axes(self) -> Any:
        """See the base class."""
        return Caches(tail=0, delta=0, keys=-1, values=-2)


def cache_shapes(layout: QwenLayout, rows: int, slots: int, held: jnp.dtype) -> Caches:
    """Shapes and dtypes of one rank's caches, as a pytree of ``jax.ShapeDtypeStruct``."""
    config = layout.config
    linear, full = len(config.linear_layers), len(config.full_layers)
    dims = (config.linear_key_head_dim, config.linear_value_head_dim)
    lead, dim = (full, rows, layout.kv_heads), config.head_dim
    return Caches(
        tail=jax.ShapeDtypeStruct((linear, rows, layout.tail_rows, layout.conv_channels), held),
        delta=jax.ShapeDtypeStruct((linear, rows, layout.value_heads, *dims), jnp.float32),
        keys=jax.ShapeDtypeStruct((*lead, dim, slots), held),
        values=jax.ShapeDtypeStruct((*lead, slots, dim), held),
    )
