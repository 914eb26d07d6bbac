"""The reference model against the outputs of K3's own modelling code.

Tolerances are those of the golden data's README. What planted mistakes do stands in
``test_reference_mistakes``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels import kda, mla, moe
from kda_mla_kernels.numerics import BF16, F32
from megakernel_kimi import reference
from tpu_collectives.testing import quick_options

MAX_LOGIT_ERROR, MEAN_LOGIT_ERROR = 1e-3, 3e-5

# Programs are compiled in a hurry: each runs a few times. Without the second option XLA
# would keep intermediates in f32.
FAST = quick_options() | {"xla_allow_excess_precision": False}


def compiled(config, numerics=F32):
    return jax.jit(
        lambda tensors, tokens: reference.forward(config, numerics, tensors, tokens),
        compiler_options=FAST,
    )


LONGEST = 85  # 70 tokens and the first 15 of their continuation


@pytest.fixture(scope="module")
def padded_run(tiny_config, tiny_tensors):
    """Runs up to 85 tokens in one program; the model is causal, so padding comes too late."""
    forward = compiled(tiny_config)

    def run(tokens):
        found = forward(tiny_tensors, np.pad(tokens, (0, LONGEST - len(tokens))))
        return jax.tree.map(np.asarray, found)

    return run


@pytest.fixture(scope="module")
def traces(golden, tiny_config, tiny_tensors, padded_run):
    """Logits and traces. What the shorter prompt leaves as its state is lost in the padding."""

    def cut(array):
        return array[:7] if array.shape[0] == LONGEST else array[:, :7]

    short = jax.tree.map(cut, padded_run(golden["len7/input_ids"]))
    long = compiled(tiny_config)(tiny_tensors, golden["len70/input_ids"])
    return {7: short, 70: jax.tree.map(np.asarray, long)}


def assert_logits_equal(logits, expected):
    error = np.abs(logits - expected)
    assert error.max() < MAX_LOGIT_ERROR
    assert error.mean() < MEAN_LOGIT_ERROR


def assert_equal_up_to_spread(ours, expected):
    """Within 2e-4 of the array's standard deviation."""
    np.testing.assert_allclose(np.stack(ours), expected, rtol=0, atol=2e-4 * expected.std())


@pytest.mark.parametrize("n", [7, 70])
def test_logits_equal_the_golden(traces, golden, n):
    assert_logits_equal(traces[n][0], golden[f"len{n}/fp32/logits"])


@pytest.mark.parametrize("n", [7, 70])
def test_the_residual_of_every_layer_equals_the_golden(traces, golden, n):
    trace = traces[n][1]
    pairs = {
        "embed": trace.embedding,
        "prefix_sum": trace.prefix,
        "block_residual": trace.blocks,
        "output_mix": trace.output_mix,
        "final_norm": trace.final_norm,
    }
    for name, ours in pairs.items():
        assert_equal_up_to_spread(ours, golden[f"len{n}/fp32/{name}"])


SUBLAYERS = ("attn_mix", "attn_in", "attn_out", "mlp_mix", "mlp_in", "mlp_out")


@pytest.mark.parametrize("name", SUBLAYERS)
def test_what_sublayers_read_and_give_equals_the_golden(traces, golden, name):
    assert_equal_up_to_spread(getattr(traces[7][1], name), golden[f"len7/fp32/{name}"])


def test_the_parts_of_the_latent_mixture_equal_the_golden(traces, golden):
    layers = traces[7][1].moe
    names = {"latent": "latent_in", "mixed": "latent_sum", "normed": "latent_norm"}
    for ours, name in (names | {"shared": "shared_out"}).items():
        parts = [getattr(layer, ours) for layer in layers]
        assert_equal_up_to_spread(parts, golden[f"len7/fp32/{name}"])


def test_the_parts_of_the_linear_attention_equal_the_golden(traces, golden):
    layers = traces[7][1].kda
    for ours, name in (("rate", "kda_g"), ("write", "kda_beta"), ("out", "kda_o")):
        parts = [getattr(layer, ours) for layer in layers]
        assert_equal_up_to_spread(parts, golden[f"len7/fp32/{name}"])
    for part, name in enumerate(("kda_q", "kda_k", "kda_v")):
        parts = [layer.conv_outputs[part] for layer in layers]
        assert_equal_up_to_spread(parts, golden[f"len7/fp32/{name}"])


@pytest.mark.parametrize("n", [7, 70])
def test_caches_and_convolution_states_equal_the_golden(traces, golden, n):
    trace = traces[n][1]
    for part, name in enumerate("qkv"):
        ours = np.stack([layer.conv_inputs[part][-4:].T for layer in trace.kda])
        expected = golden[f"len{n}/fp32/kda_conv_state_{name}"]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=5e-5)
    expected = golden[f"len{n}/fp32/mla_latent"]
    np.testing.assert_allclose(np.stack(trace.mla_rows), expected, rtol=0, atol=1e-4)


def assert_states_equal(trace, golden):
    """The golden's states are [value, key]."""
    ours = np.stack([np.swapaxes(layer.state, -1, -2) for layer in trace.kda])
    expected = golden["len70/fp32/kda_recurrent_state"]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-5)


def test_recurrent_states_equal_the_golden(traces, golden):
    assert_states_equal(traces[70][1], golden)


@pytest.mark.parametrize("n", [7, 70])
def test_routes_equal_the_golden(traces, golden, n):
    trace = traces[n][1]
    chosen = np.stack([layer.routes.experts for layer in trace.moe])
    np.testing.assert_array_equal(chosen, golden[f"len{n}/fp32/router_topk_ids_sorted"])
    expected = golden[f"len{n}/fp32/router_weights_dense"]
    np.testing.assert_allclose(np.stack(trace.router_weights), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [1, 7, 70])
def test_greedy_tokens_equal_the_golden(golden, padded_run, n):
    """Fed the prompt and the golden's tokens, the next one is always the golden's, as in a run."""
    prompt, answer = golden[f"len{n}/input_ids"], golden[f"len{n}/fp32/greedy_tokens"]
    logits, _ = padded_run(np.concatenate([prompt, answer[:-1]]))
    np.testing.assert_array_equal(logits[n - 1 : n + 15].argmax(-1), answer)
    assert_logits_equal(logits[n - 1 : n + 15], golden[f"len{n}/fp32/greedy_logits"])
    assert_logits_equal(logits[:n], golden[f"len{n}/fp32/logits"])


def chunked_sequence(state, inputs):
    batched = jax.tree.map(lambda x: x[None], inputs)
    tokens = jnp.array([inputs.beta.shape[0]])
    state, out = kda.chunked_delta_rule(state[None], batched, tokens)
    return state[0], out[0]


def attention_in_two_shares(q, cache, up, positions, numerics):
    rows, block = jnp.pad(cache, [(0, 0), (0, 80 - cache.shape[1]), (0, 0)]), 8
    key_dim, width = up.keys.shape[1:]
    shape = mla.MlaShape(key_dim, q.shape[-1] - key_dim, width)
    queries, parts = mla.absorb(q, up, numerics), []
    for rank in range(2):
        share = mla.Share.interleaved(rank, 2, block, 5)

        def fetch(index, share=share):
            return jax.lax.dynamic_slice_in_dim(rows, share.start(index), block, axis=1)

        parts.append(mla.attend_blocked(queries, fetch, share, positions, shape, numerics))
    merged = mla.merge(jax.tree.map(lambda *xs: jnp.stack(xs), *parts))
    return mla.finish(merged, up, numerics)


def test_the_forms_that_programs_run_give_the_golden(
    golden, tiny_config, tiny_tensors, monkeypatch
):
    """Chunked linear attention; absorbed attention in blocks, in two shares that are merged."""
    monkeypatch.setattr(kda, "sequence", chunked_sequence)
    monkeypatch.setattr(mla, "expanded_attention", attention_in_two_shares)
    logits, trace = compiled(tiny_config)(tiny_tensors, golden["len70/input_ids"])
    assert_logits_equal(np.asarray(logits), golden["len70/fp32/logits"])
    assert_states_equal(trace, golden)


class ForcedChoice:
    """A router whose choice can be replaced by a given one, layer after layer."""

    def __init__(self, force, chosen):
        self.force, self.layers = force, iter(chosen)

    def __call__(self, scores, bias, rule):
        # Scores lie in (0, 1), so this bias alone decides.
        given = jnp.where(next(self.layers), 2.0, 0.0)
        return moe.choose(scores, jnp.where(self.force, given, bias), rule)


@pytest.fixture(scope="module")
def bf16_logits(golden, tiny_config, tiny_tensors):
    """Logits of the 70-token prompt, by the model's own routes and by those of the golden."""
    chosen = jnp.asarray(golden["len70/bf16/router_weights_dense"] > 0)

    def forward(tensors, tokens, force):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe.latent, "choose", ForcedChoice(force, chosen))
            return reference.forward(tiny_config, BF16, tensors, tokens)[0]

    program = jax.jit(forward, compiler_options=FAST)
    tokens = golden["len70/input_ids"]
    return {
        routes: np.asarray(program(tiny_tensors, tokens, routes == "golden"))
        for routes in ("own", "golden")
    }


@pytest.mark.parametrize("numerics", ["bf16", "fp32"])
def test_bf16_is_as_near_the_golden_as_two_implementations_are(bf16_logits, golden, numerics):
    """No maximum: an expert that flips moves single logits by up to 4."""
    expected = golden[f"len70/{numerics}/logits"]
    assert np.abs(bf16_logits["own"] - expected).mean() < 0.35
    assert (bf16_logits["own"].argmax(-1) == expected.argmax(-1)).mean() > 0.75


def test_bf16_with_the_golden_routes_is_near_the_golden(bf16_logits, golden):
    error = np.abs(bf16_logits["golden"] - golden["len70/bf16/logits"])
    assert error.mean() < 0.15
    assert error.max() < 2
    agreed = bf16_logits["golden"].argmax(-1) == golden["len70/bf16/logits"].argmax(-1)
    assert agreed.mean() > 0.85
