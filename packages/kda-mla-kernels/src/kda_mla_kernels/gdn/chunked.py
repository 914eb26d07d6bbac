"""The gated delta net in chunks, for prefill: matrix products instead of a token loop.

Within a chunk of C tokens with inclusive sums ``G_i = Σ_{s<=i} g_s`` and ``D_ij = exp(G_i - G_j)``
for ``i >= j``::

    A  = I + strictly_lower(beta_i (k_i · k_j) D_ij)
    U  = A^-1 (beta v)           W = A^-1 (beta k e^G)
    V' = U - W S                 O = (q e^G) S + (q kᵀ ⊙ D) V'
    S <- e^{G_C} S + (k e^{G_C - G})ᵀ V'

Source: "Gated Delta Networks" (Yang, Kautz, Hatamizadeh 2024), section 3.3 (the WY form).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.delta.chunks import mask_valid, over_chunks
from kda_mla_kernels.delta.triangular import unit_lower_inverse
from kda_mla_kernels.gdn.inputs import GdnInputs

__all__ = ["CHUNK", "chunked_delta_rule"]

CHUNK = 64

_EXACT = lax.Precision.HIGHEST


def _chunk(state: jax.Array, x: GdnInputs) -> tuple[jax.Array, jax.Array]:
    """One chunk of every head. ``x`` fields are [S, Hv, C, ...]; state [S, Hv, K, V]."""
    total = jnp.cumsum(x.log_decay, axis=-1)
    size = total.shape[-1]
    lower = jnp.tril(jnp.ones((size, size), bool))
    # Masked before the exponential: above the diagonal the difference is positive and may overflow.
    span = jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf)
    decay = jnp.exp(span)
    growth = jnp.exp(total)[..., None]
    beta = x.beta[..., None]

    overlap = jnp.einsum("shik,shjk->shij", x.k, x.k, precision=_EXACT)
    system = jnp.tril(beta * overlap * decay, -1)
    values = jnp.concatenate([beta * x.v, beta * x.k * growth], axis=-1)
    solved = jnp.matmul(unit_lower_inverse(system), values, precision=_EXACT)
    u, w = jnp.split(solved, [x.v.shape[-1]], axis=-1)

    fresh = u - jnp.einsum("shck,shkv->shcv", w, state, precision=_EXACT)
    scores = jnp.einsum("shik,shjk->shij", x.q, x.k, precision=_EXACT) * decay
    out = jnp.einsum("shck,shkv->shcv", x.q * growth, state, precision=_EXACT)
    out += jnp.einsum("shij,shjv->shiv", scores, fresh, precision=_EXACT)

    rest = jnp.exp(total[..., -1:] - total)[..., None]
    state = growth[..., -1:, :] * state
    state += jnp.einsum("shck,shcv->shkv", x.k * rest, fresh, precision=_EXACT)
    return state, out


def chunked_delta_rule(
    state: jax.Array, inputs: GdnInputs, valid: jax.Array, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """The delta rule over T tokens, of which the first ``valid[s]`` count.

    Args:
        state: f32 [S, Hv, K, V] before the first token.
        inputs: T tokens; those from ``valid`` on are padding and may hold anything finite.
        valid: i32 [S], 0..T.
        chunk: tokens per chunk, a power of two.

    Returns:
        the state after the last valid token and outputs f32 [S, T, Hv, V].
    """
    return over_chunks(_chunk, state, mask_valid(inputs, valid), chunk)
