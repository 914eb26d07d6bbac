"""Routed experts: gated feed-forward layers and the weighted sum of their outputs.

Letters: M tokens, E experts, k experts per token, C input and output width, F expert width.

Source: "Outrageously Large Neural Networks" (Shazeer et al. 2017), eq. 1, with the rounding points
of the Kimi K3 modelling code.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.mlp.reference import Activation
from kda_mla_kernels.moe.router import Routes, dense_weights
from kda_mla_kernels.moe.routes import SortedRoutes
from kda_mla_kernels.numerics import Numerics

__all__ = ["ExpertWeights", "every_expert", "sorted_experts"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """Experts as a checkpoint stores them, [out, in], stacked."""

    gate: jax.Array
    """[E, F, C]"""
    up: jax.Array
    """[E, F, C]"""
    down: jax.Array
    """[E, C, F]"""


def every_expert(
    x: jax.Array,
    weights: ExpertWeights,
    routes: Routes,
    activation: Activation,
    numerics: Numerics,
) -> jax.Array:
    """Every expert on every token, then the weighted sum: the readable truth.

    ``Σ_e p_e round(down_e act(round(gate_e x), round(up_e x)))``, summed in f32.

    Args:
        x: [M, C].

    Returns:
        f32 [M, C], not yet rounded.
    """
    gate = numerics.round(numerics.einsum("mc,efc->emf", x, weights.gate))
    up = numerics.round(numerics.einsum("mc,efc->emf", x, weights.up))
    down = numerics.einsum("emf,ecf->emc", activation(gate, up), weights.down)
    out = numerics.round(down).astype(jnp.float32)
    shares = dense_weights(routes, len(weights.gate))
    return jnp.einsum("me,emc->mc", shares, out, precision=lax.Precision.HIGHEST)


def sorted_experts(
    x: jax.Array,
    weights: ExpertWeights,
    routes: SortedRoutes,
    activation: Activation,
    numerics: Numerics,
) -> jax.Array:
    """Only the chosen experts, each on the rows that chose it.

    Rounds as :func:`every_expert` does. With a part of the experts, this is their part of the sum.

    Args:
        x: [M, C]. weights: of the experts that ``routes`` was sorted for.

    Returns:
        f32 [M, C], not yet rounded.
    """

    def grouped(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        wide = numerics.round(matrices).astype(jnp.float32)
        out = lax.ragged_dot(
            numerics.round(rows).astype(jnp.float32),
            jnp.swapaxes(wide, 1, 2),
            routes.counts,
            precision=numerics.precision,
        )
        return numerics.round(out)

    rows = x[routes.tokens]
    act = activation(grouped(rows, weights.gate), grouped(rows, weights.up))
    out = grouped(act, weights.down).astype(jnp.float32) * routes.weights[:, None]
    # Rows of experts that are not held belong to no group: their products may be anything.
    mine = jnp.arange(len(out)) < jnp.sum(routes.counts)
    return jnp.zeros(x.shape, jnp.float32).at[routes.tokens].add(jnp.where(mine[:, None], out, 0.0))
