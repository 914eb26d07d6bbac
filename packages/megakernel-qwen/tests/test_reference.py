"""The reference model against transformers' outputs, and what planted mistakes do to it.

The gated norm's weights and A_log rounded to bf16 are not planted: every value of the golden
checkpoint is exact in bf16, so that mistake has no effect here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels import gdn, gqa, norm
from kda_mla_kernels.numerics import F32
from megakernel_qwen import reference

MAX_LOGIT_ERROR, MEAN_LOGIT_ERROR = 2e-4, 2e-5


def run(config, tensors, tokens, numerics=F32):
    logits, trace = reference.forward(config, numerics, tensors, jnp.asarray(tokens))
    return np.asarray(logits), trace


@pytest.fixture(scope="module")
def traces(golden, tiny_config, tiny_tensors):
    return {n: run(tiny_config, tiny_tensors, golden[f"len{n}/input_ids"]) for n in (7, 70)}


@pytest.mark.parametrize("n", [7, 70])
def test_logits_equal_the_golden(traces, golden, n):
    error = np.abs(traces[n][0] - golden[f"len{n}/fp32/logits"])
    assert error.max() < MAX_LOGIT_ERROR
    assert error.mean() < MEAN_LOGIT_ERROR


@pytest.mark.parametrize("n", [7, 70])
def test_hidden_states_equal_the_golden(traces, golden, n):
    trace = traces[n][1]
    for ours, name in ((np.stack(trace.hidden), "hidden"), (trace.final_norm, "final_norm")):
        expected = golden[f"len{n}/fp32/{name}"]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-4 * expected.std())


def test_sublayer_outputs_equal_the_golden(traces, golden):
    for ours, name in ((traces[7][1].mixer_out, "mixer_out"), (traces[7][1].mlp_out, "mlp_out")):
        expected = golden[f"len7/fp32/{name}"]
        np.testing.assert_allclose(np.stack(ours), expected, rtol=0, atol=2e-4 * expected.std())


@pytest.mark.parametrize("n", [7, 70])
def test_convolution_states_equal_the_golden(traces, golden, n):
    ours = np.stack([mixed[-4:].T for mixed in traces[n][1].conv_inputs])
    np.testing.assert_allclose(ours, golden[f"len{n}/fp32/gdn_conv_state"], rtol=0, atol=5e-5)


def test_recurrent_states_equal_the_golden(traces, golden):
    ours = np.stack(traces[70][1].delta_states)
    np.testing.assert_allclose(ours, golden["len70/fp32/gdn_recurrent_state"], rtol=0, atol=3e-5)


def test_bf16_is_as_near_the_golden_as_two_implementations_are(golden, bf16_logits):
    for numerics in ("bf16", "fp32"):
        expected = golden[f"len70/{numerics}/logits"]
        error = np.abs(bf16_logits - expected)
        assert error.mean() < 0.15
        assert error.max() < 1.2
        assert (bf16_logits.argmax(-1) == expected.argmax(-1)).mean() > 0.85


# Planted mistakes. Each changes one function or one tensor and must push the logits of the
# 70-token prompt out of tolerance.


def patch_function(module, name, wrong):
    def plant(monkeypatch, _config, _tensors):
        monkeypatch.setattr(module, name, wrong(getattr(module, name)))

    return plant


def change_tensors(suffix, wrong):
    def plant(_monkeypatch, config, tensors):
        for name in [name for name in tensors if name.endswith(suffix)]:
            tensors[name] = wrong(config, tensors[name])

    return plant


def plain_gain(rms_norm):
    return lambda x, gain, eps, numerics: rms_norm(x, gain - 1.0, eps, numerics)


def zero_centred_gated_norm(gated):
    return lambda x, gate, weight, eps, n: gated(x, gate, 1 + weight.astype(jnp.float32), eps, n)


def sigmoid_gated_norm(_):
    def wrong(x, gate, weight, eps, numerics):
        return norm.rms_norm(x, weight, eps, numerics) * jax.nn.sigmoid(gate)

    return wrong


def gate_before_norm(_):
    def wrong(x, gate, weight, eps, numerics):
        return norm.rms_norm(x * jax.nn.silu(gate), weight, eps, numerics)

    return wrong


def key_heads_modulo(split_heads):
    def wrong(channels, key_heads, key_dim, value_heads, value_dim):
        q, k, v = split_heads(channels, key_heads, key_dim, value_heads, value_dim)
        ratio = value_heads // key_heads
        order = [(h % key_heads) * ratio for h in range(value_heads)]
        return q[..., order, :], k[..., order, :], v

    return wrong


def unscaled_query(split_heads):
    def wrong(channels, key_heads, key_dim, *rest):
        q, k, v = split_heads(channels, key_heads, key_dim, *rest)
        return q * key_dim**0.5, k, v

    return wrong


def gates_without_decay(gates):
    return lambda *args: (jnp.zeros_like(gates(*args)[0]), gates(*args)[1])


def doubled_beta(gates):
    return lambda *args: (gates(*args)[0], 2 * gates(*args)[1])


def gates_with_raw_rate(_):
    def wrong(a, b, a_log, dt_bias, numerics):
        step = jax.nn.softplus(a + dt_bias.astype(jnp.float32))
        return -jnp.abs(a_log.astype(jnp.float32)) * step, jax.nn.sigmoid(b)

    return wrong


def convolution_without_silu(_):
    def wrong(tail, inputs, taps, numerics):
        window = jnp.concatenate([tail, inputs], axis=1)
        tokens, weights = inputs.shape[1], taps.astype(jnp.float32)
        return sum(weights[j] * window[:, j : j + tokens] for j in range(4))

    return wrong


def reversed_taps(convolve):
    return lambda tail, inputs, taps, numerics: convolve(tail, inputs, taps[::-1], numerics)


def no_rotation(_):
    return lambda x, angles, numerics: x


def interleaved_rotation(_):
    def wrong(x, angles, numerics):
        cos, sin = (part[..., None, :] for part in angles)
        width = 2 * cos.shape[-1]
        first, second = x[..., 0:width:2], x[..., 1:width:2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.concatenate([turned.reshape(*x.shape[:-1], width), x[..., width:]], axis=-1)

    return wrong


def rotation_on_last_dims(rotate):
    return lambda x, angles, n: rotate(x[..., ::-1], angles, n)[..., ::-1]


def swapped_queries_and_keys(config, matrix):
    width = config.linear_key_width
    q, k, v = np.split(matrix, [width, 2 * width])
    return np.concatenate([k, q, v])


def queries_then_gates(config, matrix):
    """What a reader that takes [all queries; all gates] would see, in the order of ours."""
    queries, gates = np.split(matrix, 2)
    heads = (config.num_attention_heads, 1, config.head_dim, -1)
    both = np.concatenate([queries.reshape(heads), gates.reshape(heads)], axis=1)
    return both.reshape(matrix.shape)


def open_output_gate(config, matrix):
    """Gate rows of zero give sigmoid 1/2: doubled values make the gate drop out."""
    both = matrix.reshape(config.num_attention_heads, 2, config.head_dim, -1).copy()
    both[:, 1] = 0
    return both.reshape(matrix.shape)


MISTAKES = {
    "gain w instead of 1 + w": patch_function(norm, "rms_norm", plain_gain),
    "gated norm gain 1 + w": patch_function(norm, "gated_rms_norm", zero_centred_gated_norm),
    "gated norm sigmoid": patch_function(norm, "gated_rms_norm", sigmoid_gated_norm),
    "gate before the norm": patch_function(norm, "gated_rms_norm", gate_before_norm),
    "key head h mod n_k": patch_function(gdn, "split_heads", key_heads_modulo),
    "no query scale": patch_function(gdn, "split_heads", unscaled_query),
    "no L2 norm": patch_function(gdn.inputs, "l2_norm", lambda _: lambda x: x),
    "no decay": patch_function(gdn, "gates", gates_without_decay),
    "beta in (0, 2)": patch_function(gdn, "gates", doubled_beta),
    "no exp of A_log": patch_function(gdn, "gates", gates_with_raw_rate),
    "no dt_bias": change_tensors("dt_bias", lambda _, bias: np.zeros_like(bias)),
    "taps reversed": patch_function(gdn, "causal_convolution", reversed_taps),
    "no SiLU": patch_function(gdn, "causal_convolution", convolution_without_silu),
    "q and k swapped": change_tensors("in_proj_qkv.weight", swapped_queries_and_keys),
    "queries then gates": change_tensors("q_proj.weight", queries_then_gates),
    "no rotation": patch_function(gqa, "apply_rotary", no_rotation),
    "interleaved rotation": patch_function(gqa, "apply_rotary", interleaved_rotation),
    "rotation on the last dims": patch_function(gqa, "apply_rotary", rotation_on_last_dims),
    "no output gate": change_tensors("q_proj.weight", open_output_gate),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(mistake, monkeypatch, golden, tiny_config, tiny_tensors):
    tensors = dict(tiny_tensors)
    MISTAKES[mistake](monkeypatch, tiny_config, tensors)
    logits, _ = run(tiny_config, tensors, golden["len70/input_ids"])
    error = np.abs(logits - golden["len70/fp32/logits"])
    assert error.max() > 100 * MAX_LOGIT_ERROR
    assert error.mean() > 100 * MEAN_LOGIT_ERROR
