"""A vocabulary that is cut over ranks: embedding rows, and logits of all of it.

Letters: M tokens, D hidden, V vocabulary, N vocabulary rows of a rank.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.backend.ranks import RANKS, sum_over_ranks
from kda_mla_kernels.head import Candidates
from kda_mla_kernels.numerics import Numerics

__all__ = ["embed", "gather_candidates", "gather_logits"]


def embed(table: jax.Array, tokens: jax.Array, numerics: Numerics) -> jax.Array:
    """Rows of a table of which each rank has [N, D]: i32 [M] -> [M, D], activation dtype."""
    rows_of_a_rank = table.shape[0]
    local = tokens - lax.axis_index(RANKS) * rows_of_a_rank
    mine = (local >= 0) & (local < rows_of_a_rank)
    rows = table[jnp.where(mine, local, 0)]
    return numerics.round(sum_over_ranks(jnp.where(mine[:, None], rows, 0).astype(jnp.float32)))


def gather_logits(mine: jax.Array, vocabulary: int) -> jax.Array:
    """f32 [M, N] of every rank -> f32 [M, V] on each, without the padding rows."""
    return lax.all_gather(mine, RANKS, axis=1, tiled=True)[:, :vocabulary]


def gather_candidates(mine: Candidates, rows: int, wanted: int) -> tuple[jax.Array, jax.Array]:
    """The largest logits of the whole vocabulary from those of every rank's part of it.

    Args:
        mine: of this rank, at least ``wanted`` of each row.

    Returns:
        f32 [rows, wanted] values, falling, and i32 ids, the lowest first among equal values.
    """
    values, ids = (
        lax.all_gather(part[:rows, :wanted], RANKS, axis=1, tiled=True)
        for part in (mine.values, mine.ids)
    )
    # Ranks have ascending ids and top_k prefers early places, so equal values stay in order.
    best, places = lax.top_k(values, wanted)
    return best, jnp.take_along_axis(ids, places, axis=1)
