"""Kimi delta attention against fla's outputs, and its three forms against each other."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels import kda, norm
from kda_mla_kernels.kda.chunked import decayed_products
from kda_mla_kernels.numerics import BF16, F32
from tpu_collectives.testing import quick_options

GOLDEN = Path(__file__).parent / "golden" / "components"

# One program each, as models run them; op by op every shape would be dozens of programs. What is
# not compared bit for bit is compiled in a hurry.
QUICKLY = quick_options(same_bits=True)
chunked_delta_rule = jax.jit(kda.chunked_delta_rule, static_argnums=3, compiler_options=QUICKLY)
replay = jax.jit(kda.replay)
sequence = jax.jit(kda.sequence)


@jax.jit
def recur_each(states, inputs):
    """The recurrent form over [S, T, ...] inputs, sequence after sequence."""
    s, t = inputs.beta.shape[:2]
    flat = jax.tree.map(lambda x: x.reshape(s * t, *x.shape[2:]), inputs)
    states, out, steps = kda.recur(states, flat, jnp.repeat(jnp.arange(s), t))
    return states, out.reshape(s, t, *out.shape[1:]), steps


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "kda.npz") as data:
        return dict(data)


@pytest.fixture(scope="module")
def inputs(golden):
    """The golden's raw tensors through our own gates and normalisation."""
    q, k = kda.unit_heads(jnp.asarray(golden["q"]), jnp.asarray(golden["k"]))
    bias = jnp.asarray(golden["dt_bias"].reshape(q.shape[-2:]))
    raw = (jnp.asarray(golden[name]) for name in ("g_raw", "beta_raw", "A_log"))
    log_decay, beta = kda.gates(*raw, bias, float(golden["lower_bound"]))
    return kda.DeltaInputs(q, k, jnp.asarray(golden["v"]), log_decay, beta)


TOKENS = 130


def random_inputs(tokens=TOKENS, seed=0, lowest=-5.0):
    rng = np.random.default_rng(seed)
    shape = (2, tokens, 3, 16)

    def unit():
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    inputs = kda.DeltaInputs(
        q=unit() / 4,
        k=unit(),
        v=rng.normal(size=shape),
        log_decay=lowest / (1 + np.exp(-rng.normal(size=shape) * 3)),
        beta=1 / (1 + np.exp(-rng.normal(size=shape[:-1]))),
    )
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), inputs)


def random_state(seed=9):
    """Drawn by numpy: jax would compile a program for each shape."""
    state = np.random.default_rng(seed).normal(size=(2, 3, 16, 16)) * 0.1
    return jnp.asarray(state, jnp.float32)


def test_gates_and_unit_vectors_equal_the_golden(golden, inputs):
    np.testing.assert_allclose(inputs.log_decay, golden["gate_lower_bound"], rtol=1e-5)
    np.testing.assert_allclose(inputs.beta, golden["beta"], rtol=1e-5)
    np.testing.assert_allclose(inputs.k, golden["k_l2"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(inputs.q * 8, golden["q_l2"], rtol=1e-5, atol=1e-7)


def test_the_gate_is_not_the_softplus_one(golden, inputs):
    """The golden holds the gate of a sibling model too; ours must be far from it."""
    assert np.abs(inputs.log_decay - golden["gate_softplus"]).max() > 0.1


@pytest.mark.parametrize("form", ["recurrent", "chunked", "sequence"])
@pytest.mark.parametrize("case", ["zero_init", "with_init"])
def test_outputs_and_state_equal_the_golden(golden, inputs, form, case):
    state = jnp.asarray(golden["initial_state"]) * (case == "with_init")
    if form == "recurrent":
        state, out, _ = recur_each(state, inputs)
    elif form == "chunked":
        state, out = chunked_delta_rule(state, inputs, jnp.array([70]))
    else:
        both = sequence(state[0], jax.tree.map(lambda x: x[0], inputs))
        state, out = (x[None] for x in both)
    np.testing.assert_allclose(out, golden[f"{case}_o"], rtol=0, atol=2e-6)
    np.testing.assert_allclose(state, golden[f"{case}_final_state"], rtol=0, atol=2e-6)


def test_one_token_equals_the_golden(golden, inputs):
    first = jax.tree.map(lambda x: x[:, 0], inputs)
    state, out, _ = kda.delta_rule(
        jnp.asarray(golden["initial_state"]),
        first.q,
        first.k,
        first.v,
        jnp.exp(first.log_decay),
        first.beta,
    )
    np.testing.assert_allclose(out, golden["one_token_o"][:, 0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(state, golden["one_token_state"], rtol=0, atol=2e-6)


def test_states_after_shorter_prompts_equal_the_golden(golden, inputs):
    start = jnp.zeros_like(jnp.asarray(golden["initial_state"]))
    for length, expected in zip(golden["state_after_lengths"], golden["state_after"]):
        state, _ = chunked_delta_rule(start, inputs, jnp.array([length]))
        np.testing.assert_allclose(state[0], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_chunked_equals_recurrent_for_any_length(tokens):
    x, start = random_inputs(tokens), random_state()
    state, out, _ = recur_each(start, x)
    chunk_state, chunk_out = chunked_delta_rule(start, x, jnp.array([tokens, tokens]))
    np.testing.assert_allclose(chunk_out, out, rtol=0, atol=5e-6)
    np.testing.assert_allclose(chunk_state, state, rtol=0, atol=5e-6)


@pytest.mark.parametrize("chunk", [8, 128])
def test_the_size_of_a_chunk_does_not_matter(chunk):
    x, start = random_inputs(), random_state()
    state, out, _ = recur_each(start, x)
    valid = jnp.array([TOKENS, TOKENS])
    chunk_state, chunk_out = chunked_delta_rule(start, x, valid, chunk)
    np.testing.assert_allclose(chunk_out, out, rtol=0, atol=5e-6)
    np.testing.assert_allclose(chunk_state, state, rtol=0, atol=5e-6)


@pytest.mark.parametrize("valid", [0, 1, 16, 65])
def test_padding_after_the_valid_tokens_changes_nothing(valid):
    x, start = random_inputs(), random_state()
    state, out = chunked_delta_rule(start, x, jnp.array([valid, TOKENS]))
    live = jnp.arange(TOKENS) < jnp.array([[valid], [TOKENS]])
    expected, expected_out, _ = recur_each(start, kda.mask_tokens(x, live))
    np.testing.assert_allclose(state, expected, rtol=0, atol=5e-6)
    np.testing.assert_allclose(out[0, :valid], expected_out[0, :valid], rtol=0, atol=5e-6)
    if valid == 0:
        np.testing.assert_array_equal(state[0], start[0])


def test_products_exponentiate_only_differences_that_are_not_positive():
    """Sums reach -5 per token: e^320 in the middle of a chunk would not be finite."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 64, 8)).astype(np.float32)
    # Half of the channels forget at once, half hardly at all.
    steps = np.where(np.arange(8) % 2, -5.0, -1e-3) * rng.uniform(0.5, 1, (64, 8))
    total = np.cumsum(steps, axis=0)
    ours = jax.jit(decayed_products)(x, y, jnp.asarray(steps, jnp.float32))
    span = total[:, None] - total[None]
    expected = np.tril(np.einsum("td,sd,tsd->ts", x, y, np.exp(np.minimum(span, 0))))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=5e-6)


def test_extreme_gates_stay_finite():
    x, start = random_inputs(), jnp.ones((2, 3, 16, 16))
    log_decay = x.log_decay.at[:, ::3].set(-80.0).at[:, 1::3, :, ::2].set(0.0)
    x = kda.DeltaInputs(x.q, x.k, x.v, log_decay, x.beta)
    state, out, _ = recur_each(start, x)
    chunk_state, chunk_out = chunked_delta_rule(start, x, jnp.array([TOKENS, TOKENS]))
    assert np.isfinite(chunk_out).all()
    # Sums inside a block of 16 reach 480, where half a step of f32 is 1.5e-5: so is the relative
    # error of a decay between two of its tokens.
    np.testing.assert_allclose(chunk_out, out, rtol=0, atol=1.5e-5)
    np.testing.assert_allclose(chunk_state, state, rtol=0, atol=1.5e-5)


def test_nearly_equal_keys_in_a_row_stay_exact():
    x, start = random_inputs(), random_state()
    keys = x.k[:, :1] + 1e-3 * x.k
    keys /= jnp.linalg.norm(keys, axis=-1, keepdims=True)
    slow, eager = jnp.full_like(x.log_decay, -1e-4), jnp.full_like(x.beta, 0.9999)
    x = kda.DeltaInputs(keys / 4, keys, x.v, slow, eager)
    state, out, _ = recur_each(start, x)
    chunk_state, chunk_out = chunked_delta_rule(start, x, jnp.array([TOKENS, TOKENS]))
    np.testing.assert_allclose(chunk_out, out, rtol=0, atol=2e-5)
    np.testing.assert_allclose(chunk_state, state, rtol=0, atol=2e-5)


def test_replay_is_bit_equal_to_feeding_the_accepted_tokens():
    x, start = random_inputs(8), random_state()
    counts = np.array([3, 8])
    owner = jnp.repeat(jnp.arange(2), 8)
    _, _, steps = recur_each(start, x)
    accepted = jnp.asarray((np.arange(8) < counts[:, None]).reshape(-1))
    replayed = replay(start, steps, owner, accepted)
    for s, count in enumerate(counts):
        state = start[s : s + 1]
        for t in range(count):
            one = jax.tree.map(lambda a, s=s, t=t: a[s : s + 1, t : t + 1], x)
            state, _, _ = recur_each(state, one)
        np.testing.assert_array_equal(replayed[s], state[0])


def test_the_sigmoid_gated_norm_equals_the_golden():
    with np.load(GOLDEN / "small_ops.npz") as data:
        x, gate, weight, out = (data[f"gated_norm_{n}"] for n in ("x", "gate", "weight", "out"))
    ours = norm.sigmoid_gated_rms_norm(jnp.asarray(x), gate, weight, 1e-5, F32)
    np.testing.assert_allclose(ours, out, rtol=1e-5, atol=1e-6)


def test_bf16_policy_rounds_where_the_docstrings_say():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 32)), jnp.bfloat16)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=32), jnp.bfloat16)
    wide = x.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_array_equal(
        norm.stepwise_rms_norm(x, weight, 1e-5, BF16), unit.astype(jnp.bfloat16) * weight
    )
    once = (unit * weight.astype(jnp.float32) * jax.nn.sigmoid(wide)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(norm.sigmoid_gated_rms_norm(x, x, weight, 1e-5, BF16), once)
    # Gates stay f32: a state lives as long as the sequence.
    _, beta = kda.gates(jnp.ones((1, 2, 4)), jnp.ones((1, 2)), jnp.ones(2), jnp.ones((2, 4)), -5.0)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-1)), rtol=1e-6)
