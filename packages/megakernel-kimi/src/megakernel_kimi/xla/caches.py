"""What sequences leave behind, per rank.

Letters: R rows, L slots of a rank, W convolution taps, H KDA heads, K their dim, C latent width, S
shared key dims; Nk KDA layers, Nm MLA layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from kda_mla_kernels.backend import DeltaCaches
from kda_mla_kernels.delta import tail_rows

from megakernel_kimi.layout import KimiLayout

__all__ = ["Caches", "cache_shapes"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Caches(DeltaCaches):
    """The state of all rows on one rank: arrays, or their shapes before they exist.

    ``tail`` is [Nk, R, tail rows, 3 H K] and ``delta`` f32 [Nk, R, H, K, K].
    """

    latents: Any
    """[Nm, R, L, C] normed latents, the same on every rank that holds the same positions"""
    shared: Any
    """[Nm, R, S, L] key dims that heads share, as columns: rows of 64 would be padded to 128"""

    holders: int = field(metadata={"static": True})
    """as in the layout: caches of other models may have the same shapes"""

    @property
    def slots(self) -> int:
        """L."""
        return self.latents.shape[-2]

    def position_axes(self) -> Any:
        """See the base class."""
        return replace(self, tail=0, delta=0, latents=-2, shared=-1)


def cache_shapes(layout: KimiLayout, rows: int, slots: int, held: jnp.dtype) -> Caches:
    """Shapes and dtypes of one rank's caches, as a pytree of ``jax.ShapeDtypeStruct``.

    Args:
        slots: of a row, on all ranks together.
    """
    config, slots = layout.config, layout.rank_slots(slots)
    linear, latent = len(config.kda_layers), len(config.mla_layers)
    dim, width = config.kda_head_dim, 3 * layout.kda_width
    return Caches(
        tail=jax.ShapeDtypeStruct((linear, rows, tail_rows(config.conv_kernel_size), width), held),
        delta=jax.ShapeDtypeStruct((linear, rows, layout.kda_heads, dim, dim), jnp.float32),
        latents=jax.ShapeDtypeStruct((latent, rows, slots, config.kv_lora_rank), held),
        shared=jax.ShapeDtypeStruct((latent, rows, config.qk_rope_head_dim, slots), held),
        holders=layout.holders,
    )
