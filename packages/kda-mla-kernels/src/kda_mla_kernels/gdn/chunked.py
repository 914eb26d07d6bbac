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

from kda_mla_kernels.gdn.inputs import GdnInputs, mask_tokens

__all__ = ["CHUNK", "chunked_delta_rule"]

CHUNK = 64

_EXACT = lax.Precision.HIGHEST


def unit_lower_inverse(matrix: jax.Array) -> jax.Array:
    """Inverse of unit lower triangular matrices by doubling blocks.

    From the inverses of the diagonal blocks of size n follow those of size 2n::

        [A 0]^-1   [   A^-1      0  ]
        [C B]    = [-B^-1 C A^-1 B^-1]

    Only products of exact inverses occur, so equal keys in a row, which make powers of the strictly
    lower part huge, do no harm (a Neumann product would lose everything there).

    Args:
        matrix: f32 [..., C, C], C a power of two; only the strictly lower part is read.

    Returns:
        f32 [..., C, C].
    """
    size = matrix.shape[-1]
    inverse = jnp.ones((*matrix.shape[:-2], size, 1, 1), matrix.dtype)
    block = 1
    while block < size:
        pairs = size // (2 * block)
        tiles = matrix.reshape(*matrix.shape[:-2], pairs, 2, block, pairs, 2, block)
        own = jnp.diagonal(tiles, axis1=-6, axis2=-3)  # [..., 2, block, 2, block, pairs]
        corner = jnp.moveaxis(own[..., 1, :, 0, :, :], -1, -3)
        halves = inverse.reshape(*matrix.shape[:-2], pairs, 2, block, block)
        upper, lower = halves[..., 0, :, :], halves[..., 1, :, :]
        corner = -jnp.matmul(jnp.matmul(lower, corner, precision=_EXACT), upper, precision=_EXACT)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
        block *= 2
    return inverse[..., 0, :, :]


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
    tokens = inputs.beta.shape[1]
    padded = -(-tokens // chunk) * chunk

    def to_chunks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, padded - tokens)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], padded // chunk, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)  # [chunks, S, Hv, C, ...]

    live = jnp.arange(tokens)[None, :] < valid[:, None]
    masked = jax.tree.map(to_chunks, mask_tokens(inputs, live))
    state, out = lax.scan(_chunk, state, masked)
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 2, 3)  # [S, chunks, C, Hv, V]
    return state, out.reshape(out.shape[0], padded, *out.shape[3:])[:, :tokens]
