"""The pass over a layer's latents; rounds as ``mla.blocked``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from kda_mla_kernels.attention.softmax import Running, add_tile
from kda_mla_kernels.attention.sweep import CacheSweep
from kda_mla_kernels.mla.kernel.partial import pack
from kda_mla_kernels.numerics import Numerics

__all__ = ["LatentSweep", "attend"]


def attend(
    running: Running,
    q: jax.Array,
    tile: tuple[Any, Any],
    visible: jax.Array,
    scale: float,
    numerics: Numerics,
) -> Running:
    """Adds a tile.

    Args:
        q: [N, C + D or more] in the activation dtype.
        tile: references or arrays, shared key dims [D, K] and latents [K, C].
        visible: bool [N, K].
    """
    shared, latent = tile
    width, end = latent.shape[-1], latent.shape[-1] + shared.shape[0]
    scores = numerics.dot_rows(q[:, :width], latent[...])
    scores = (scores + numerics.dot(q[:, width:end], shared[...])) * scale
    return add_tile(running, [scores], [latent], visible, numerics)


@dataclass(frozen=True)
class LatentSweep(CacheSweep):
    """Attention of a block's absorbed queries over latents and shared key dims.

    Attributes:
        scale: factor of the scores.
    """

    scale: float = 1.0

    def attend(
        self, running: Running, queries: jax.Array, tile: tuple[Any, Any], visible: jax.Array
    ) -> Running:
        """Adds a tile."""
        return attend(running, queries[0], tile, visible, self.scale, self.numerics)

    def result(self, running: Running) -> jax.Array:
        """The weighted mean of the latents; of a share of the positions, what can be merged."""
        return running.out / running.total if self.split is None else pack(running)
