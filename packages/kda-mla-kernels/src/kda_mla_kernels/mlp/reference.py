"""The activation between the two products of a gated feed-forward layer.

Source: "GLU Variants Improve Transformer" (Shazeer 2020), SwiGLU, with the rounding points of the
Qwen3.5 modelling code; SiTU and its rounding from the Kimi K3 modelling code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from kda_mla_kernels.numerics import Numerics

__all__ = ["Activation", "situ", "swiglu"]

Activation: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""Rounded gate and up [..., F] -> the rounded input of the down projection."""


def swiglu(gate: jax.Array, up: jax.Array, numerics: Numerics) -> jax.Array:
    """``round(round(silu(gate)) · up)``.

    Args:
        gate, up: [..., F], outputs of their projections, already rounded.

    Returns:
        [..., F] in the activation dtype, the input of the down projection.
    """
    activated = numerics.round(jax.nn.silu(gate.astype(jnp.float32)))
    return numerics.round(activated.astype(jnp.float32) * up.astype(jnp.float32))


def situ(
    gate: jax.Array, up: jax.Array, beta: float, linear_beta: float, numerics: Numerics
) -> jax.Array:
    """``round(beta tanh(gate/beta) · sigmoid(gate) · linear_beta tanh(up/linear_beta))``.

    A SwiGLU whose two factors are capped: the sigmoid reads the gate as it came.

    Args:
        gate, up: [..., F], outputs of their projections, already rounded.
        beta, linear_beta: caps of the gate and of the linear branch, above 0.

    Returns:
        [..., F] in the activation dtype, one rounding.
    """
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    capped = beta * jnp.tanh(gate / beta)
    linear = linear_beta * jnp.tanh(up / linear_beta)
    return numerics.round(capped * jax.nn.sigmoid(gate) * linear)
