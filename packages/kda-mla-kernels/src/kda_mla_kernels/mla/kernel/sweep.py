"""The pass over a layer's latents; rounds as ``mla.blocked``."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from kda_mla_kernels.attention.cache import Cache
from kda_mla_kernels.attention.softmax import Running
from kda_mla_kernels.attention.sweep import CacheSweep, Scores
from kda_mla_kernels.mla.kernel.partial import pack

__all__ = ["LatentSweep"]


@dataclass(frozen=True)
class LatentSweep(CacheSweep):
    """Attention of a block's absorbed queries over latents and shared key dims.

    Attributes:
        scale: factor of the scores.
    """

    scale: float = 1.0

    def scores(self, queries: jax.Array, tile: Cache) -> Scores:
        """Products with the latents and with the shared key dims, scaled.

        The matrix units turn latents around for it, which takes twice the time of a plain product;
        a second copy in columns would double the bytes, which take longer.
        """
        width, end = self.cache.row_dim, self.cache.record_width
        q = queries[0]
        latent = self.numerics.dot_rows(q[:, :width], tile.rows[...])
        return [(latent + self.numerics.dot(q[:, width:end], tile.columns[...])) * self.scale]

    def result(self, running: Running) -> jax.Array:
        """The weighted mean of the latents; of a share of the positions, what can be merged."""
        return running.out / running.total if self.split is None else pack(running)
