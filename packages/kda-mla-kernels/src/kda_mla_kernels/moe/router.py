"""The router: which experts a token goes to, and with which weights.

Letters: M tokens, D hidden, E experts, k experts per token.

Source: "DeepSeek-V3" (DeepSeek-AI 2024), section 2.1.2 (sigmoid affinities, a bias that only
selects), as in the Kimi K3 modelling code, with one group of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kda_mla_kernels.moe.top_k import top_k_mask
from kda_mla_kernels.numerics import Numerics

__all__ = ["RouterRule", "Routes", "choose", "dense_weights", "router_scores"]

SUM_EPS = 1e-20
"""Added to the sum of the chosen scores, as the model does."""


@dataclass(frozen=True)
class RouterRule:
    """How routes follow from scores.

    Raises:
        ValueError: ``top_k`` is below 1.
    """

    top_k: int
    renormalize: bool = True
    """whether a token's weights are divided by their sum"""
    scale: float = 1.0
    """factor of all weights"""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; a token needs at least one expert")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routes:
    """Where tokens go."""

    experts: jax.Array
    """i32 [M, k], ascending in each row"""
    weights: jax.Array
    """f32 [M, k]"""


def router_scores(x: jax.Array, weight: jax.Array, numerics: Numerics) -> jax.Array:
    """``sigmoid(W x)``: x [M, D], weight [E, D] -> f32 [M, E], summed and kept in f32."""
    return jax.nn.sigmoid(numerics.dot_rows(x, numerics.round(weight)))


def choose(scores: jax.Array, bias: jax.Array, rule: RouterRule) -> Routes:
    """Takes the k largest of ``scores + bias``, lowest index first where they are equal.

    The bias only selects; weights are the scores themselves.

    Args:
        scores: f32 [M, E]. bias: f32 [E].
    """
    experts = scores.shape[-1]
    chosen = top_k_mask(scores + bias.astype(jnp.float32), rule.top_k)
    place = jnp.cumsum(chosen, axis=-1) - 1
    # One true entry for each of the k places.
    holds = chosen[:, None] & (place[:, None] == jnp.arange(rule.top_k)[:, None])
    weights = jnp.sum(jnp.where(holds, scores[:, None], 0.0), axis=-1)
    if rule.renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + SUM_EPS)
    ids = jnp.sum(jnp.where(holds, jnp.arange(experts, dtype=jnp.int32), 0), axis=-1)
    return Routes(ids, weights * rule.scale)


def dense_weights(routes: Routes, experts: int) -> jax.Array:
    """Weight of every expert, 0 where not chosen: f32 [M, E]."""
    here = routes.experts[..., None] == jnp.arange(experts)
    return jnp.sum(jnp.where(here, routes.weights[..., None], 0.0), axis=1)
