"""Attention and rotary embedding against plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.gqa import (
    KEY_BLOCK,
    apply_rotary,
    blocked_attention,
    output_gate,
    plain_attention,
    rotary_angles,
)
from kda_mla_kernels.numerics import BF16, F32


def normal(*shape, seed):
    """Drawn by numpy: jax would compile a program for each shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def case(slots, tokens=3, sequences=2):
    q = normal(sequences, tokens, 8, 16, seed=0)
    return q, *(normal(sequences, 2, slots, 16, seed=seed) for seed in (1, 2))


def numpy_attention(q, k, v, positions):
    out = np.zeros(q.shape)
    for s, t, h in np.ndindex(q.shape[:3]):
        seen = positions[s, t] + 1
        keys, values = k[s, h // 4, :seen], v[s, h // 4, :seen]
        scores = keys @ q[s, t, h] / 4
        p = np.exp(scores - scores.max())
        out[s, t, h] = (p / p.sum()) @ values
    return out


def blocked(q, k, v, positions, numerics):
    block = min(KEY_BLOCK, k.shape[2])

    def fetch(start):
        keys, values = (jax.lax.dynamic_slice_in_dim(x, start, block, axis=2) for x in (k, v))
        return jnp.swapaxes(keys, 2, 3), values

    return blocked_attention(q, fetch, positions, numerics, block)


@pytest.mark.parametrize("attention", [plain_attention, blocked])
@pytest.mark.parametrize("slots", [8, KEY_BLOCK, 4 * KEY_BLOCK])
def test_attention_equals_numpy(attention, slots):
    q, k, v = case(slots)
    positions = np.array([[0, 1, 2], [slots - 3, slots - 2, slots - 1]])
    ours = attention(q, k, v, jnp.asarray(positions), F32)
    expected = numpy_attention(*(np.asarray(x, np.float64) for x in (q, k, v)), positions)
    np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_both_forms_round_alike_in_bf16():
    """Within one block the running maximum is the maximum, so the forms round the same values."""
    q, k, v = (x.astype(jnp.bfloat16) for x in case(KEY_BLOCK))
    positions = jnp.array([[0, 1, 2], [KEY_BLOCK - 3, KEY_BLOCK - 2, KEY_BLOCK - 1]])
    plain, online = (f(q, k, v, positions, BF16) for f in (plain_attention, blocked))
    assert plain.dtype == online.dtype == jnp.bfloat16
    assert (np.asarray(plain) == np.asarray(online)).mean() > 0.99
    np.testing.assert_allclose(
        plain.astype(jnp.float32), online.astype(jnp.float32), rtol=2**-7, atol=1e-6
    )


def test_the_output_gate_rounds_the_sigmoid_first():
    x = normal(2, 4, 8, seed=3).astype(jnp.bfloat16)
    gate = normal(2, 4, 8, seed=4).astype(jnp.bfloat16)
    opened = jax.nn.sigmoid(gate.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(output_gate(x, gate, BF16), x * opened)


def test_a_row_does_not_depend_on_longer_neighbours():
    q, k, v = case(4 * KEY_BLOCK)
    short = jnp.array([[5, 6, 7], [5, 6, 7]])
    long = short.at[1].add(3 * KEY_BLOCK)
    for numerics in (F32, BF16):
        alone = blocked(q, k, v, short, numerics)
        beside = blocked(q, k, v, long, numerics)
        np.testing.assert_array_equal(alone[0], beside[0])


def test_stale_slots_behind_the_query_are_not_seen():
    q, k, v = case(KEY_BLOCK)
    positions = jnp.array([[1, 2, 3], [1, 2, 3]])
    clean = blocked(q, k, v, positions, F32)
    dirty = blocked(q, k.at[:, :, 4:].set(1e9), v.at[:, :, 4:].set(1e9), positions, F32)
    np.testing.assert_array_equal(clean, dirty)


def test_rotary_rotates_half_split_pairs_and_leaves_the_rest():
    x = normal(5, 2, 16, seed=0)
    positions = jnp.array([0, 1, 7, 1000, 200_000])
    ours = np.asarray(apply_rotary(x, rotary_angles(positions, 8, 1e7, F32), F32))
    angle = np.asarray(positions)[:, None] * 1e7 ** (-2 * np.arange(4) / 8)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = np.asarray(x[..., :4]), np.asarray(x[..., 4:8])
    np.testing.assert_allclose(ours[..., :4], first * cos - second * sin, atol=3e-2)
    np.testing.assert_allclose(ours[:4, :, 4:8], (second * cos + first * sin)[:4], atol=2e-4)
    np.testing.assert_array_equal(ours[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(ours[0], x[0])


def test_bf16_rotary_rounds_each_product():
    x = normal(1, 1, 4, seed=1).astype(jnp.bfloat16)
    cos, sin = rotary_angles(jnp.array([3]), 4, 1e4, BF16)
    ours = apply_rotary(x, (cos, sin), BF16)
    assert ours.dtype == jnp.bfloat16
    expected = (x[0, 0, 0] * cos[0, 0]) - (x[0, 0, 2] * sin[0, 0])
    np.testing.assert_array_equal(ours[0, 0, 0], expected)
