"""The gated delta net, one token at a time.

Letters: S sequences, T tokens, C convolution channels (queries, keys, values), W taps,
Hk key heads, Hv value heads, K key dim, V value dim. States are f32 [..., Hv, K, V].

Source: "Gated Delta Networks" (Yang, Kautz, Hatamizadeh 2024), eq. 10, with the gates and
rounding points of the Qwen3.5 modelling code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.norm import l2_norm
from kda_mla_kernels.numerics import Numerics

__all__ = [
    "DeltaStep",
    "GdnInputs",
    "causal_convolution",
    "delta_rule",
    "gates",
    "mask_tokens",
    "recur",
    "replay",
    "split_heads",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GdnInputs:
    """What the delta rule reads, all f32."""

    q: jax.Array
    """[S, T, Hv, K] unit length, then scaled by K^-0.5"""
    k: jax.Array
    """[S, T, Hv, K] unit length"""
    v: jax.Array
    """[S, T, Hv, V]"""
    log_decay: jax.Array
    """[S, T, Hv], g <= 0; the state is multiplied by exp(g)"""
    beta: jax.Array
    """[S, T, Hv] in (0, 1)"""


class DeltaStep(NamedTuple):
    """What one token did to the state: ``S <- decay · S + key ⊗ update``."""

    decay: jax.Array
    """f32 [S, T, Hv]"""
    key: jax.Array
    """f32 [S, T, Hv, K]"""
    update: jax.Array
    """f32 [S, T, Hv, V]"""


def mask_tokens(inputs: GdnInputs, live: jax.Array) -> GdnInputs:
    """Makes tokens neutral that are not ``live`` [S, T]: they neither decay nor change a state."""
    return GdnInputs(
        q=inputs.q,
        k=jnp.where(live[..., None, None], inputs.k, 0.0),
        v=jnp.where(live[..., None, None], inputs.v, 0.0),
        log_decay=jnp.where(live[..., None], inputs.log_decay, 0.0),
        beta=jnp.where(live[..., None], inputs.beta, 0.0),
    )


def causal_convolution(
    tail: jax.Array, inputs: jax.Array, taps: jax.Array, numerics: Numerics
) -> jax.Array:
    """Depthwise causal convolution over tokens, then SiLU; one rounding at the end.

    ``y_t = silu(Σ_j taps[j] · x_{t-W+1+j})``: the last tap multiplies the current token.

    Args:
        tail: [S, W-1, C] the inputs before the first token, oldest first; zeros at the start.
        inputs: [S, T, C] before the convolution. taps: [W, C].

    Returns:
        [S, T, C] in the activation dtype.
    """
    window = jnp.concatenate([tail, inputs], axis=1).astype(jnp.float32)
    tokens, weights = inputs.shape[1], taps.astype(jnp.float32)
    total = sum(weights[j] * window[:, j : j + tokens] for j in range(taps.shape[0]))
    return numerics.round(jax.nn.silu(total))


def gates(
    a: jax.Array, b: jax.Array, a_log: jax.Array, dt_bias: jax.Array, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """``g = -exp(A_log) · softplus(a + dt_bias)`` in f32 and ``beta = round(sigmoid(b))``.

    Args:
        a, b: [..., Hv] projections of the token. a_log, dt_bias: [Hv].

    Returns:
        log decay and beta, f32 [..., Hv].
    """
    rate = jnp.exp(a_log.astype(jnp.float32))
    step = jax.nn.softplus(a.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    beta = numerics.round(jax.nn.sigmoid(b.astype(jnp.float32)))
    return -rate * step, beta.astype(jnp.float32)


def split_heads(
    channels: jax.Array, key_heads: int, key_dim: int, value_heads: int, value_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts convolved channels into queries, keys and values, and normalises the first two.

    Value head h reads key head ``h // (Hv / Hk)``. The query carries the factor K^-0.5.

    Args:
        channels: [S, T, C], C = queries, keys, values, each head-major.

    Returns:
        f32 q, k [S, T, Hv, K] and v [S, T, Hv, V].
    """
    width = key_heads * key_dim
    q, k, v = jnp.split(channels, [width, 2 * width], axis=-1)
    lead = channels.shape[:-1]
    repeat = value_heads // key_heads

    def unit(x: jax.Array) -> jax.Array:
        return jnp.repeat(l2_norm(x.reshape(*lead, key_heads, key_dim)), repeat, axis=-2)

    values = v.reshape(*lead, value_heads, value_dim).astype(jnp.float32)
    return unit(q) * key_dim**-0.5, unit(k), values


def delta_rule(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token: the prediction uses the decayed state, the output the updated one.

    ``u = beta (v - decay · Sᵀk)``, ``S <- decay · S + k ⊗ u``, ``o = Sᵀq``.

    A replayed state must have the bits of a decoded one. So the step that moves S is one
    expression, shared with :func:`replay`: a compiler that fuses a product into the sum then
    chooses the same product in both. Tokens that must not count are therefore made neutral
    (decay 1, update 0) instead of selecting between the old and the new state.

    Args:
        state: [..., K, V]. q, k: [..., K]. v: [..., V]. decay, beta: [...]. All f32.

    Returns:
        the new state, the output [..., V] and the update u [..., V].
    """
    predicted = decay[..., None] * jnp.sum(state * k[..., :, None], axis=-2)
    update = beta[..., None] * (v - predicted)
    state = _move(state, decay, k, update)
    return state, jnp.sum(state * q[..., :, None], axis=-2), update


def _move(state: jax.Array, decay: jax.Array, key: jax.Array, update: jax.Array) -> jax.Array:
    return state * decay[..., None, None] + key[..., :, None] * update[..., None, :]


def _token(state: jax.Array, x: GdnInputs) -> tuple[jax.Array, tuple[jax.Array, DeltaStep]]:
    decay = jnp.exp(x.log_decay)
    state, out, update = delta_rule(state, x.q, x.k, x.v, decay, x.beta)
    return state, (out, DeltaStep(decay, x.k, update))


def recur(state: jax.Array, inputs: GdnInputs) -> tuple[jax.Array, jax.Array, DeltaStep]:
    """The delta rule over T tokens, one by one.

    Args:
        state: f32 [S, Hv, K, V] before the first token.

    Returns:
        the state after the last token, outputs f32 [S, T, Hv, V] and the replay records.
    """
    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
    state, outputs = lax.scan(_token, state, by_token)
    out, steps = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)
    return state, out, steps


def replay(state: jax.Array, steps: DeltaStep, accepted: jax.Array) -> jax.Array:
    """Applies the first ``accepted[s]`` recorded tokens of each sequence, in decode's order.

    Args:
        state: f32 [..., S, Hv, K, V]. steps: as recorded, with the same leading axes.
        accepted: i32 [S], 0..T.

    Returns:
        the state that feeding these tokens one by one leaves.
    """
    axis = state.ndim - 3  # the token axis of the records

    def token(carry: jax.Array, step: tuple[jax.Array, DeltaStep]) -> tuple[jax.Array, None]:
        t, (decay, key, update) = step
        counts = t < accepted
        decay = jnp.where(counts[:, None], decay, 1.0)
        update = jnp.where(counts[:, None, None], update, 0.0)
        return _move(carry, decay, key, update), None

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), steps)
    count = by_token.decay.shape[0]
    return lax.scan(token, state, (jnp.arange(count), by_token))[0]
