"""Latent mixture of experts: routed experts work on a narrow projection of the token.

The router and the shared experts read the full width, the routed experts a latent::

    z = down x          r = norm(Σ_e p_e expert_e(z))          out = up r + shared(x)

The norm is on the sum, not on any expert's output, so it divides out the scale of the weights p.

Letters: M tokens, D hidden, C latent width, E experts, F width of all shared experts together.

Source: the Kimi K3 modelling code (equations and rounding points).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from kda_mla_kernels.mlp import Activation, situ
from kda_mla_kernels.moe.experts import ExpertWeights, sorted_experts
from kda_mla_kernels.moe.router import RouterRule, Routes, choose, router_scores
from kda_mla_kernels.moe.routes import sort_routes
from kda_mla_kernels.norm import stepwise_rms_norm
from kda_mla_kernels.numerics import Numerics

__all__ = ["LatentMoeRule", "LatentMoeTrace", "LatentMoeWeights", "MlpWeights", "latent_moe"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MlpWeights:
    """A gated feed-forward layer, matrices as stored, [out, in]."""

    gate: jax.Array
    """[F, D]"""
    up: jax.Array
    """[F, D]"""
    down: jax.Array
    """[D, F]"""

    def __call__(self, x: jax.Array, activation: Activation, numerics: Numerics) -> jax.Array:
        """``down(act(gate x, up x))``: [M, D] -> [M, D] in the activation dtype."""
        gate, up = (_project(x, matrix, numerics) for matrix in (self.gate, self.up))
        return _project(activation(gate, up), self.down, numerics)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentMoeWeights:
    """A layer's feed-forward part, matrices as stored, [out, in]."""

    router: jax.Array
    """[E, D]"""
    router_bias: jax.Array
    """f32 [E]"""
    down: jax.Array
    """[C, D]"""
    norm: jax.Array
    """[C]"""
    up: jax.Array
    """[D, C]"""
    experts: ExpertWeights
    shared: MlpWeights
    """all shared experts as one"""


@dataclass(frozen=True)
class LatentMoeRule:
    """The numbers of a layer that are not weights."""

    router: RouterRule
    situ_beta: float
    situ_linear_beta: float
    norm_eps: float

    def activation(self, numerics: Numerics) -> Activation:
        """SiTU with these caps."""
        return partial(
            situ, beta=self.situ_beta, linear_beta=self.situ_linear_beta, numerics=numerics
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentMoeTrace:
    """Everything on the way through the layer."""

    routes: Routes
    latent: jax.Array
    """[M, C] input of the experts"""
    mixed: jax.Array
    """[M, C] rounded weighted sum of the experts"""
    normed: jax.Array
    """[M, C]"""
    shared: jax.Array
    """[M, D] output of the shared experts"""


def latent_moe(
    x: jax.Array, weights: LatentMoeWeights, rule: LatentMoeRule, numerics: Numerics
) -> tuple[jax.Array, LatentMoeTrace]:
    """The whole layer: normed x [M, D] -> [M, D] in the activation dtype, and its trace."""
    activation = rule.activation(numerics)
    routes = choose(router_scores(x, weights.router, numerics), weights.router_bias, rule.router)
    latent = _project(x, weights.down, numerics)
    by_expert = sort_routes(routes, range(len(weights.router)))
    mixed = numerics.round(sorted_experts(latent, weights.experts, by_expert, activation, numerics))
    normed = stepwise_rms_norm(mixed, weights.norm, rule.norm_eps, numerics)
    shared = weights.shared(x, activation, numerics)
    routed = _project(normed, weights.up, numerics)
    out = numerics.round(routed.astype(jnp.float32) + shared.astype(jnp.float32))
    return out, LatentMoeTrace(routes, latent, mixed, normed, shared)


def _project(x: jax.Array, matrix: jax.Array, numerics: Numerics) -> jax.Array:
    return numerics.round(numerics.dot_rows(x, numerics.round(matrix)))
