"""The gated delta net against third-party outputs, and its three forms against each other."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels import gdn
from kda_mla_kernels.delta.triangular import unit_lower_inverse
from kda_mla_kernels.gdn import GdnInputs, causal_convolution, gates, recur, sequence, split_heads
from kda_mla_kernels.numerics import BF16, F32
from tpu_collectives.testing import quick_options

# One program each, as models run them; op by op every shape would be dozens of programs.
# The chunked form agrees to a tolerance, so it may be compiled in a hurry.
QUICKLY = quick_options(same_bits=True)
chunked_delta_rule = jax.jit(gdn.chunked_delta_rule, compiler_options=QUICKLY)
replay = jax.jit(gdn.replay)

GOLDEN = Path(__file__).parent / "golden" / "components"
HEADS, VALUE_HEADS, DIM = 2, 6, 32


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "gated_delta_rule.npz") as data:
        return dict(data)


@pytest.fixture(scope="module")
def inputs(golden):
    """The golden's raw tensors through our own gates, normalisation and head repetition."""
    tokens = golden["q"].shape[1]
    channels = np.concatenate(
        [golden[name].reshape(1, tokens, -1) for name in ("q", "k", "v")], axis=-1
    )
    q, k, v = split_heads(jnp.asarray(channels), HEADS, DIM, VALUE_HEADS, DIM)
    log_decay, beta = gates(golden["a"], golden["b"], golden["A_log"], golden["dt_bias"], F32)
    return GdnInputs(q, k, v, log_decay, beta)


@jax.jit
def recur_each(states, inputs):
    """The recurrent form over [S, T, ...] inputs, sequence after sequence."""
    s, t = inputs.beta.shape[:2]
    flat = jax.tree.map(lambda x: x.reshape(s * t, *x.shape[2:]), inputs)
    states, out, steps = recur(states, flat, jnp.repeat(jnp.arange(s), t))
    return states, out.reshape(s, t, *out.shape[1:]), steps


def normal(shape, seed):
    """Drawn by numpy: jax would compile a program for each shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def random_inputs(tokens, seed=0, sequences=2, heads=3, dim=16):
    rng = np.random.default_rng(seed)
    shape = (sequences, tokens, heads)

    def unit():
        x = rng.normal(size=(*shape, dim))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    inputs = GdnInputs(
        q=unit() * dim**-0.5,
        k=unit(),
        v=rng.normal(size=(*shape, dim)),
        log_decay=-np.logaddexp(0, rng.normal(size=shape) * 3),
        beta=1 / (1 + np.exp(-rng.normal(size=shape))),
    )
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), inputs)


def test_gates_and_unit_vectors_equal_the_golden(golden, inputs):
    np.testing.assert_allclose(inputs.log_decay, golden["gate"], rtol=1e-5)
    np.testing.assert_allclose(inputs.beta, golden["beta"], rtol=1e-5)
    np.testing.assert_allclose(inputs.k[:, :, ::3], golden["k_l2"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(inputs.q[:, :, ::3] * DIM**0.5, golden["q_l2"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
@pytest.mark.parametrize("case", ["zero_init", "with_init"])
def test_outputs_and_state_equal_the_golden(golden, inputs, form, case):
    state = jnp.asarray(golden["initial_state"]) * (case == "with_init")
    if form == "recurrent":
        state, out, _ = recur_each(state, inputs)
    else:
        state, out = chunked_delta_rule(state, inputs, jnp.array([70]))
    np.testing.assert_allclose(out, golden[f"{case}_o"], atol=2e-6)
    np.testing.assert_allclose(state, golden[f"{case}_final_state"], atol=2e-6)


def test_one_token_equals_the_golden(golden, inputs):
    first = jax.tree.map(lambda x: x[:, :1], inputs)
    state, out, _ = recur_each(jnp.asarray(golden["initial_state"]), first)
    np.testing.assert_allclose(out, golden["one_token_o"], atol=2e-6)
    np.testing.assert_allclose(state, golden["one_token_state"], atol=2e-6)


def test_a_whole_sequence_is_the_recurrent_form_of_one():
    x = random_inputs(20)
    start = normal((2, 3, 16, 16), seed=9) * 0.1
    states, out, _ = recur_each(start, x)
    for s in range(2):
        state, own = sequence(start[s], jax.tree.map(lambda a, s=s: a[s], x))
        np.testing.assert_allclose(own, out[s], rtol=0, atol=1e-6)
        np.testing.assert_allclose(state, states[s], rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_chunked_equals_recurrent_for_any_length(tokens):
    x = random_inputs(tokens)
    start = normal((2, 3, 16, 16), seed=9) * 0.1
    state, out, _ = recur_each(start, x)
    chunk_state, chunk_out = chunked_delta_rule(start, x, jnp.array([tokens, tokens]))
    np.testing.assert_allclose(chunk_out, out, atol=5e-6)
    np.testing.assert_allclose(chunk_state, state, atol=5e-6)


@pytest.mark.parametrize("valid", [0, 1, 5, 70])
def test_padding_after_the_valid_tokens_changes_nothing(valid):
    x = random_inputs(70)
    start = normal((2, 3, 16, 16), seed=9) * 0.1
    state, out = chunked_delta_rule(start, x, jnp.array([valid, 70]))
    short = jax.tree.map(lambda a: a[:1, :valid], x)
    expected, expected_out, _ = recur_each(start[:1], short)
    np.testing.assert_allclose(state[:1], expected, atol=5e-6)
    np.testing.assert_allclose(out[:1, :valid], expected_out, atol=5e-6)


def test_extreme_gates_stay_finite():
    x = random_inputs(130)
    x = GdnInputs(x.q, x.k, x.v, x.log_decay.at[:, ::3].set(-80.0).at[:, 1::3].set(0.0), x.beta)
    start = jnp.ones((2, 3, 16, 16))
    state, out, _ = recur_each(start, x)
    chunk_state, chunk_out = chunked_delta_rule(start, x, jnp.array([130, 130]))
    assert np.isfinite(chunk_out).all()
    # Sums of g reach 1760, where an f32 step is 1.2e-4: so is the relative error of e^(G_i - G_j).
    np.testing.assert_allclose(chunk_out, out, atol=1.2e-4)
    np.testing.assert_allclose(chunk_state, state, atol=1.2e-4)


def test_equal_keys_in_a_row_stay_exact():
    x = random_inputs(64)
    same = jnp.broadcast_to(x.k[:, :1], x.k.shape)
    x = GdnInputs(same * 16**-0.5, same, x.v, jnp.zeros_like(x.log_decay), jnp.ones_like(x.beta))
    start = jnp.zeros((2, 3, 16, 16))
    state, out, _ = recur_each(start, x)
    chunk_state, chunk_out = chunked_delta_rule(start, x, jnp.array([64, 64]))
    np.testing.assert_allclose(chunk_out, out, atol=5e-6)
    np.testing.assert_allclose(chunk_state, state, atol=5e-6)


def test_unit_lower_inverse_equals_numpy():
    lower = np.tril(np.random.default_rng(0).normal(size=(3, 32, 32)), -1) * 0.3
    expected = np.linalg.inv(lower + np.eye(32))
    np.testing.assert_allclose(
        jax.jit(unit_lower_inverse)(jnp.asarray(lower, jnp.float32)), expected, rtol=1e-4, atol=1e-4
    )


def test_replay_is_bit_equal_to_feeding_the_accepted_tokens():
    x = random_inputs(8)
    start = normal((2, 3, 16, 16), seed=9)
    _, _, steps = recur_each(start, x)
    step = jax.jit(lambda states, token: recur(states, token, jnp.arange(2))[0])
    fed = [start]  # the state after each count of tokens, fed one by one
    for t in range(8):
        fed.append(step(fed[-1], jax.tree.map(lambda a, t=t: a[:, t], x)))
    for accepted in range(9):
        counts = (accepted, 8 - accepted)
        owner = jnp.repeat(jnp.arange(2), 8)
        real = jnp.tile(jnp.arange(8), 2) < jnp.array(counts)[owner]
        moved = replay(start, steps, owner, real)
        for s, count in enumerate(counts):
            np.testing.assert_array_equal(moved[s], fed[count][s])


def test_convolution_equals_numpy_and_continues_from_its_tail():
    rng = np.random.default_rng(0)
    x, taps = rng.normal(size=(2, 9, 5)).astype("f"), rng.normal(size=(4, 5)).astype("f")
    full = causal_convolution(jnp.zeros((2, 3, 5)), jnp.asarray(x), jnp.asarray(taps), F32)
    padded = np.concatenate([np.zeros((2, 3, 5), "f"), x], axis=1)
    y = sum(taps[j] * padded[:, j : j + 9] for j in range(4))
    np.testing.assert_allclose(full, y / (1 + np.exp(-y)), rtol=2e-5, atol=1e-6)
    rest = causal_convolution(jnp.asarray(x[:, 1:4]), jnp.asarray(x[:, 4:]), jnp.asarray(taps), F32)
    np.testing.assert_array_equal(rest, full[:, 4:])


def test_convolution_equals_the_golden():
    with np.load(GOLDEN / "small_ops.npz") as data:
        names = [name for name in data if "conv" in name]
        assert names, "the golden file holds no convolution"
        case = {name: data[name] for name in names}
    x, weight, out = (case[f"conv_{part}"] for part in ("x", "weight", "out"))
    tail = jnp.zeros((x.shape[0], 3, x.shape[2]))
    ours = causal_convolution(tail, jnp.asarray(x), jnp.asarray(weight.reshape(-1, 4).T), F32)
    np.testing.assert_allclose(ours, out, rtol=1e-5, atol=1e-6)


def test_bf16_policy_rounds_where_the_docstrings_say():
    a = b = jnp.linspace(-4, 4, 6)
    _, beta = gates(a, b, jnp.zeros(6), jnp.zeros(6), BF16)
    np.testing.assert_array_equal(beta, jax.nn.sigmoid(b).astype(jnp.bfloat16).astype(jnp.float32))
    x = jnp.ones((1, 2, 4))
    assert causal_convolution(jnp.zeros((1, 3, 4)), x, jnp.ones((4, 4)), BF16).dtype == jnp.bfloat16
