"""The activation between the two products of a gated feed-forward layer.

Source: "GLU Variants Improve Transformer" (Shazeer 2020), SwiGLU, with the rounding points of the
Qwen3.5 modelling code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kda_mla_kernels.numerics import Numerics

__all__ = ["swiglu"]


def swiglu(gate: jax.Array, up: jax.Array, numerics: Numerics) -> jax.Array:
    """``round(round(silu(gate)) · up)``.

    Args:
        gate, up: [..., F], outputs of their projections, already rounded.

    Returns:
        [..., F] in the activation dtype, the input of the down projection.
    """
    activated = numerics.round(jax.nn.silu(gate.astype(jnp.float32)))
    return numerics.round(activated.astype(jnp.float32) * up.astype(jnp.float32))
