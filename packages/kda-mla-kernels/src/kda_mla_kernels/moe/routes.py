"""All routes of a step sorted by expert, so that each expert is read once.

Letters: M tokens, E experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kda_mla_kernels.moe.router import Routes

__all__ = ["SortedRoutes", "sort_routes"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SortedRoutes:
    """M · k routes, those of one expert side by side and there in order of the tokens."""

    tokens: jax.Array
    """i32 [M k], the row that each route reads and adds to"""
    weights: jax.Array
    """f32 [M k], 0 for routes to experts that are not held"""
    counts: jax.Array
    """i32 [held experts], routes of each; routes to other experts stand behind them all"""


def sort_routes(routes: Routes, held: range) -> SortedRoutes:
    """Sorts all routes by expert.

    Args:
        held: the experts of interest, a run without gaps: all, or those of one rank.
    """
    top_k = routes.experts.shape[-1]
    expert = routes.experts.reshape(-1) - held.start
    mine = (expert >= 0) & (expert < len(held))
    expert = jnp.where(mine, expert, len(held))
    order = jnp.argsort(expert, stable=True)
    return SortedRoutes(
        tokens=(order // top_k).astype(jnp.int32),
        weights=jnp.where(mine, routes.weights.reshape(-1), 0.0)[order],
        counts=jnp.sum(expert[:, None] == jnp.arange(len(held)), axis=0, dtype=jnp.int32),
    )
