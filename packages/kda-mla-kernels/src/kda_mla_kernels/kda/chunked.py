"""Kimi delta attention in chunks, for prefill: matrix products instead of a token loop.

Within a chunk of C tokens with inclusive sums ``G_t = Σ_{s<=t} g_s`` per key channel, and with

    <x, y>_ts = Σ_d x_td y_sd exp(G_td - G_sd)    for s <= t, else 0

it holds that::

    A  = I + strictly_lower(beta_t <k, k>_ts)
    U  = A^-1 (beta v)           W = A^-1 (beta k e^G)
    V' = U - W S                 O = (q e^G) S + <q, k> V'
    S <- e^{G_C} S + (k e^{G_C - G})ᵀ V'

``exp(G_t) · exp(-G_s)`` would overflow: G falls by up to 5 per token. So a chunk is cut into blocks
of rows. Pairs of different blocks are a product of two factors: the decay from the later block's
start to t, and that from s to the start; pairs inside a block take the difference of sums. Only
sums of log decays, which are at most 0, are exponentiated, and none of them is a difference of sums
longer than a block: a decay near 1 behind strong ones stays exact.

Letters: S sequences, T tokens of each, H heads, C tokens of a chunk, B tokens of a block, K key
dim, V value dim.

Source: "Kimi Linear" (Kimi Team 2025), section 3.2; the blocks are those of "Gated Linear
Attention" (Yang et al. 2023), section 4.3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.delta.chunks import mask_valid, over_chunks
from kda_mla_kernels.delta.inputs import DeltaInputs
from kda_mla_kernels.delta.triangular import unit_lower_inverse

__all__ = ["BLOCK", "CHUNK", "chunked_delta_rule"]

CHUNK = 64
BLOCK = 16
"""Tokens whose pairs are weighed one by one: C · B · K exponentials per chunk and head."""

_EXACT = lax.Precision.HIGHEST


def _sums_after(steps: jax.Array) -> jax.Array:
    """Sum of the steps behind each one: [..., N, K] -> [..., N, K], zero at the end."""
    onwards = lax.cumsum(steps, axis=steps.ndim - 2, reverse=True)
    return jnp.concatenate([onwards[..., 1:, :], jnp.zeros_like(steps[..., :1, :])], axis=-2)


def decayed_products(x: jax.Array, y: jax.Array, log_decay: jax.Array) -> jax.Array:
    """``<x, y>``, zero above the diagonal.

    Args:
        x, y, log_decay: f32 [..., C, K].

    Returns:
        f32 [..., C, C].
    """
    *lead, size, dim = x.shape
    block = min(BLOCK, size)
    count = size // block
    rows, columns, steps = (a.reshape(*lead, count, block, dim) for a in (x, y, log_decay))
    sums = jnp.cumsum(steps, axis=-2)

    # For a block n of rows and a block m of columns before it: what lies between the two.
    n, m, j = jnp.ogrid[:count, :count, :count]
    inner = ((m < j) & (j < n)).astype(jnp.float32)
    between = jnp.einsum("nmj,...jd->...nmd", inner, sums[..., -1, :], precision=_EXACT)
    reach = _sums_after(steps)[..., None, :, :, :] + between[..., :, :, None, :]
    earlier = (jnp.arange(count) < jnp.arange(count)[:, None])[..., None, None]
    weighed = columns[..., None, :, :, :] * jnp.exp(jnp.where(earlier, reach, -jnp.inf))
    across = jnp.einsum("...ntd,...nmsd->...ntms", rows * jnp.exp(sums), weighed, precision=_EXACT)

    lower = jnp.tril(jnp.ones((block, block), bool))[..., None]
    span = jnp.where(lower, sums[..., :, None, :] - sums[..., None, :, :], -jnp.inf)
    pairs = rows[..., :, None, :] * columns[..., None, :, :] * jnp.exp(span)
    own = jnp.sum(pairs, axis=-1)[..., None, :] * jnp.eye(count)[:, None, :, None]
    return (across + own).reshape(*lead, size, size)


def _chunk(state: jax.Array, x: DeltaInputs) -> tuple[jax.Array, jax.Array]:
    """One chunk of every head. ``x`` fields are [S, H, C, ...]; state [S, H, K, V]."""
    growth = jnp.exp(jnp.cumsum(x.log_decay, axis=-2))
    beta = x.beta[..., None]

    system = jnp.tril(beta * decayed_products(x.k, x.k, x.log_decay), -1)
    values = jnp.concatenate([beta * x.v, beta * x.k * growth], axis=-1)
    solved = jnp.matmul(unit_lower_inverse(system), values, precision=_EXACT)
    u, w = jnp.split(solved, [x.v.shape[-1]], axis=-1)

    fresh = u - jnp.matmul(w, state, precision=_EXACT)
    scores = decayed_products(x.q, x.k, x.log_decay)
    out = jnp.matmul(x.q * growth, state, precision=_EXACT)
    out += jnp.matmul(scores, fresh, precision=_EXACT)

    rest = jnp.exp(_sums_after(x.log_decay))
    state = jnp.swapaxes(growth[..., -1:, :], -1, -2) * state
    state += jnp.einsum("shck,shcv->shkv", x.k * rest, fresh, precision=_EXACT)
    return state, out


def chunked_delta_rule(
    state: jax.Array, inputs: DeltaInputs, valid: jax.Array, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """The delta rule over T tokens, of which the first ``valid[s]`` count.

    Args:
        state: f32 [S, H, K, V] before the first token.
        inputs: fields [S, T, ...], log decays per key channel; tokens from ``valid`` on are padding
            and may hold anything finite.
        valid: i32 [S], 0..T.
        chunk: tokens per chunk, a power of two.

    Returns:
        the state after the last valid token and outputs f32 [S, T, H, V].
    """
    return over_chunks(_chunk, state, mask_valid(inputs, valid), chunk)
