"""The gated delta net, one token at a time.

Letters: S sequences, T tokens of each, M tokens of all, C convolution channels (queries, keys,
values), W taps, Hk key heads, Hv value heads, K key dim, V value dim. States are f32
[..., Hv, K, V].

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
    "convolve",
    "delta_rule",
    "gates",
    "mask_tokens",
    "recur",
    "replay",
    "split_heads",
    "token_windows",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GdnInputs:
    """What the delta rule reads, all f32. The axes before the heads are the tokens."""

    q: jax.Array
    """[..., Hv, K] unit length, then scaled by K^-0.5"""
    k: jax.Array
    """[..., Hv, K] unit length"""
    v: jax.Array
    """[..., Hv, V]"""
    log_decay: jax.Array
    """[..., Hv], g <= 0; the state is multiplied by exp(g)"""
    beta: jax.Array
    """[..., Hv] in (0, 1)"""


class DeltaStep(NamedTuple):
    """What one token did to the state: ``S <- decay · S + key ⊗ update``."""

    decay: jax.Array
    """f32 [M, Hv]"""
    key: jax.Array
    """f32 [M, Hv, K]"""
    update: jax.Array
    """f32 [M, Hv, V]"""


def mask_tokens(inputs: GdnInputs, live: jax.Array) -> GdnInputs:
    """Makes tokens neutral that are not ``live`` [...]: they neither decay nor change a state."""
    return GdnInputs(
        q=inputs.q,
        k=jnp.where(live[..., None, None], inputs.k, 0.0),
        v=jnp.where(live[..., None, None], inputs.v, 0.0),
        log_decay=jnp.where(live[..., None], inputs.log_decay, 0.0),
        beta=jnp.where(live[..., None], inputs.beta, 0.0),
    )


def token_windows(tail: jax.Array, inputs: jax.Array) -> jax.Array:
    """What each token's convolution sees.

    Args:
        tail: [S, W-1, C] the inputs before the first token, oldest first; zeros at the start.
        inputs: [S, T, C].

    Returns:
        [S, T, W, C], oldest first.
    """
    line = jnp.concatenate([tail, inputs], axis=1)
    tokens = inputs.shape[1]
    return jnp.stack([line[:, j : j + tokens] for j in range(tail.shape[1] + 1)], axis=2)


def convolve(windows: jax.Array, taps: jax.Array, numerics: Numerics) -> jax.Array:
    """Depthwise convolution of each token's window, then SiLU; one rounding at the end.

    ``y = silu(Σ_j taps[j] · window[j])``: the last tap multiplies the current token.

    Args:
        windows: [..., W, C]. taps: [W, C].

    Returns:
        [..., C] in the activation dtype.
    """
    wide, weights = windows.astype(jnp.float32), taps.astype(jnp.float32)
    total = sum(weights[j] * wide[..., j, :] for j in range(taps.shape[0]))
    return numerics.round(jax.nn.silu(total))


def causal_convolution(
    tail: jax.Array, inputs: jax.Array, taps: jax.Array, numerics: Numerics
) -> jax.Array:
    """The short convolution of whole sequences: [S, T, C] -> [S, T, C]."""
    return convolve(token_windows(tail, inputs), taps, numerics)


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
        channels: [..., C], C = queries, keys, values, each head-major.

    Returns:
        f32 q, k [..., Hv, K] and v [..., Hv, V].
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

    ``u = beta (v - Sᵀ(decay · k))``, ``S <- decay · S + k ⊗ u``, ``o = Sᵀq``.

    A replayed state must have the bits of a decoded one. So the step that moves S is one
    expression, shared with :func:`replay`: a compiler that fuses a product into the sum then
    chooses the same product in both. Tokens that must not count are therefore made neutral
    (decay 1, update 0) instead of selecting between the old and the new state.

    Args:
        state: [..., K, V]. q, k: [..., K]. v: [..., V]. decay, beta: [...]. All f32.

    Returns:
        the new state, the output [..., V] and the update u [..., V].
    """
    predicted = _read(state, decay[..., None] * k)
    update = beta[..., None] * (v - predicted)
    state = _move(state, decay, k, update)
    return state, _read(state, q), update


def _read(state: jax.Array, key: jax.Array) -> jax.Array:
    """``Sᵀ key``."""
    return jnp.einsum("...kv,...k->...v", state, key, precision=lax.Precision.HIGHEST)


def _move(state: jax.Array, decay: jax.Array, key: jax.Array, update: jax.Array) -> jax.Array:
    return state * decay[..., None, None] + key[..., :, None] * update[..., None, :]


def recur(
    states: jax.Array, inputs: GdnInputs, owner: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, DeltaStep]:
    """The delta rule over M tokens in order, each moving the state of the sequence it belongs to.

    One token is one turn of one loop whatever M and S are: a compiler that orders sums by shape
    therefore rounds a token alike in a step of many sequences and in a step of many tokens.

    Args:
        states: f32 [S, Hv, K, V] before the first token.
        inputs: fields [M, ...].
        owner: i32 [M] index of each token's sequence; None: all belong to sequence 0.

    Returns:
        the states after the last token, outputs f32 [M, Hv, V] and the replay records.
    """

    def token(
        states: jax.Array, step: tuple[jax.Array, GdnInputs]
    ) -> tuple[jax.Array, tuple[jax.Array, DeltaStep]]:
        mine, x = step
        decay = jnp.exp(x.log_decay)
        state, out, update = delta_rule(states[mine], x.q, x.k, x.v, decay, x.beta)
        return states.at[mine].set(state), (out, DeltaStep(decay, x.k, update))

    owners = jnp.zeros(inputs.beta.shape[0], jnp.int32) if owner is None else owner
    states, (out, steps) = lax.scan(token, states, (owners, inputs))
    return states, out, steps


def replay(states: jax.Array, steps: DeltaStep, owner: jax.Array, counts: jax.Array) -> jax.Array:
    """Applies recorded tokens in decode's order.

    Args:
        states: f32 [S, Hv, K, V] before the first token. steps: fields [M, ...].
        owner: i32 [M] as in :func:`recur`. counts: bool [M], which tokens are applied.

    Returns:
        the states that feeding these tokens one by one leaves.
    """

    def token(
        states: jax.Array, step: tuple[jax.Array, jax.Array, DeltaStep]
    ) -> tuple[jax.Array, None]:
        mine, real, (decay, key, update) = step
        decay, update = jnp.where(real, decay, 1.0), jnp.where(real, update, 0.0)
        return states.at[mine].set(_move(states[mine], decay, key, update)), None

    return lax.scan(token, states, (owner, counts, steps))[0]
