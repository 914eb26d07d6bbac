"""The dense layer and the latent mixture of experts: normed [M, D] -> [M, D] on every rank."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from kda_mla_kernels import moe, norm
from kda_mla_kernels.backend import RANKS, sum_over_ranks

from megakernel_kimi.weights import MlpWeights, MoeWeights
from megakernel_kimi.xla.rank import Rank

__all__ = ["dense_mlp", "mixture_of_experts"]


def _rule(rank: Rank) -> moe.LatentMoeRule:
    config = rank.layout.config
    return moe.LatentMoeRule(
        moe.RouterRule(
            config.num_experts_per_token, config.moe_renormalize, config.routed_scaling_factor
        ),
        config.situ_beta,
        config.situ_linear_beta,
        config.rms_norm_eps,
    )


def dense_mlp(rank: Rank, weights: MlpWeights, x: jax.Array) -> jax.Array:
    """``down(situ(gate x, up x))``."""
    gate, up = jnp.split(rank.project(x, weights.gate_up), 2, axis=-1)
    act = _rule(rank).activation(rank.numerics)(gate, up)
    return rank.numerics.round(sum_over_ranks(rank.numerics.dot(act, weights.down)))


def mixture_of_experts(rank: Rank, weights: MoeWeights, x: jax.Array, few_rows: bool) -> jax.Array:
    """Router and latent, routed experts, norm of their sum, projection back, shared experts.

    Args:
        weights: of the layer; its experts stay in the stack of all layers.
        few_rows: whether rows must not depend on each other, as in decoding.
    """
    layout, config, numerics = rank.layout, rank.layout.config, rank.numerics
    rule, latent = _rule(rank), config.routed_expert_hidden_size
    # The router's scores are not rounded, so they travel with the latent in f32.
    scores, z = rank.gather(
        numerics.dot(x, weights.in_proj),
        ((layout.router_columns, config.num_experts), (layout.latent_columns, latent)),
    )
    routes = moe.choose(jax.nn.sigmoid(scores), weights.router_bias, rule.router)
    first = lax.axis_index(RANKS) // layout.expert_tp * layout.experts
    assert weights.experts is not None, "the loop over layers puts them back"
    held = moe.HeldExperts(weights.experts, first, rank.held)
    experts = moe.packed_experts if few_rows else moe.packed_experts_in_tiles
    partial = experts(numerics.round(z), held, routes, rule.activation(numerics), numerics)
    mixed = numerics.round(sum_over_ranks(partial))
    normed = norm.stepwise_rms_norm(mixed, weights.norm, rule.norm_eps, numerics)
    columns = ((layout.hidden_columns, config.hidden_size),)
    (routed,) = rank.gather(rank.project(normed, weights.up), columns)
    shared = dense_mlp(rank, weights.shared, x)
    return numerics.round(routed.astype(jnp.float32) + shared.astype(jnp.float32))
