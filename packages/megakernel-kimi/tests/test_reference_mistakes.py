"""What planted mistakes do to the reference's outputs: each is seen, and costs what it should.

The third party broke its own model in the same ways, and the figures of ``SWITCHED`` and ``READ``
are what that did to its logits. A mistake of ours must cost as much within 2 %, so it is the same
mistake, and must be seen by the logits' tolerance. What the latent norm hides from the logits must
be seen by the router's weights. One program holds the mistakes in the maths behind switches, so
that they are compiled once.

Not planted: rounding ``e_score_correction_bias`` to bf16. It changes no choice here (the logits do
not move by a bit, nor did the third party's); that it is read as stored is tested with the reading.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kda_mla_kernels import gqa, kda, mla, moe, norm, residual
from kda_mla_kernels.numerics import F32
from megakernel_kimi import reference
from tpu_collectives.testing import quick_options

MAX_LOGIT_ERROR, MEAN_LOGIT_ERROR, ROUTER_ERROR = 1e-3, 3e-5, 1e-5


class Switches:
    """Which mistake is made, a traced number, while the program is traced."""

    def __init__(self, on, patch):
        self.on, self.patch = on, patch

    def pick(self, mistake, wrong, right):
        return jnp.where(self.on == list(SWITCHED).index(mistake), wrong, right)


def lora_eps(right, switches):
    def norm(x, weight, eps, numerics):
        if eps == 1e-6:
            eps = switches.pick("lora norms: eps of the others", 1e-5, eps)
        return right(x, weight, eps, numerics)

    return norm


def output_norm(right, switches):
    def gated(x, gate, weight, eps, n):
        eps = switches.pick("KDA: o_norm eps 1e-6", 1e-6, eps)
        plain = norm.rms_norm(x, weight, eps, n)
        first = norm.rms_norm(x * jax.nn.sigmoid(gate), weight, eps, n)
        y = switches.pick("KDA: output gate before the norm", first, right(x, gate, weight, eps, n))
        return switches.pick("KDA: output gate SiLU", plain * jax.nn.silu(gate), y)

    return gated


def mixture(right, switches):
    reads, fold, weights = [], residual.fold, []

    def remember(weight, projection):
        weights.append(weight.astype(jnp.float32))
        return fold(weight, projection)

    def mix(blocks, prefix, vector, eps, n):
        reads.append(None)
        if not len(blocks):
            return right(blocks, prefix, vector, eps, n)
        sources = jnp.concatenate([blocks, prefix[None]])
        units = sources * jax.lax.rsqrt(jnp.mean(sources**2, -1, keepdims=True) + eps) * weights[-1]

        def mixed(scores, values):
            return jnp.einsum("bm,bmd->md", jax.nn.softmax(scores, axis=0), values)

        raw = jnp.einsum("bmd,d->bm", sources, vector, precision="highest")
        y = right(blocks, prefix, vector, eps, n)
        y = switches.pick("residual: scores of raw states", mixed(raw, sources), y)
        scores = residual.scores(sources, vector, eps)
        y = switches.pick("residual: normalised values", mixed(scores, units), y)
        y = switches.pick("residual: plain sum", sources.sum(0), y)
        if len(reads) == 15:  # two for each of seven layers, then the output's
            y = switches.pick("residual: last mix left out", prefix, y)
        return y

    switches.patch.setattr(residual, "fold", remember)
    return mix


def continued_block(right, switches):
    def close_block(stream):
        past = stream.prefix
        right(stream)
        nothing = jnp.zeros_like(past)
        # Behind the first block, which is the embedding alone, the sum does start anew.
        kept = past if len(stream.blocks) > 1 else nothing
        stream.prefix = switches.pick("residual: prefix not restarted", kept, nothing)

    return close_block


def activation(right, switches):
    def situ(gate, up, beta, linear_beta, numerics):
        swapped = right(up, gate, beta, linear_beta, numerics)
        y = right(gate, up, beta, linear_beta, numerics)
        y = switches.pick("SiTU: gate and up swapped", swapped, y)
        y = switches.pick("SiTU: SwiGLU", jax.nn.silu(gate) * up, y)
        capped, linear = beta * jnp.tanh(gate / beta), linear_beta * jnp.tanh(up / linear_beta)
        inside = capped * jax.nn.sigmoid(capped) * linear
        y = switches.pick("SiTU: sigmoid of the capped gate", inside, y)
        return switches.pick("SiTU: no cap on up", capped * jax.nn.sigmoid(gate) * up, y)

    return situ


def decay(right, switches):
    def gates(rate, write, a_log, dt_bias, lower_bound):
        slope = jnp.exp(a_log)[:, None]
        g, beta = right(rate, write, a_log, dt_bias, lower_bound)
        softplus = -slope * jax.nn.softplus(rate + dt_bias)
        late = lower_bound * jax.nn.sigmoid(slope * rate + dt_bias)
        g = switches.pick("KDA: softplus gate", softplus, g)
        return switches.pick("KDA: dt_bias after the factor", late, g), beta

    return gates


def query_scale(right, switches):
    def unit_heads(q, k):
        q, k = right(q, k)
        return switches.pick("KDA: no query scale", q * q.shape[-1] ** 0.5, q), k

    return unit_heads


def convolution(right, switches):
    def convolve(tail, inputs, taps, numerics):
        line = jnp.concatenate([tail, inputs], axis=1)
        linear = (kda.token_windows(line, len(taps)) * taps).sum(axis=2)
        y = right(tail, inputs, taps, numerics)
        return switches.pick("KDA: no SiLU after the convolution", linear, y)

    return convolve


def attention(right, switches):
    def attend(q, cache, up, positions, numerics):
        own, width = up.keys.shape[1], up.keys.shape[2]
        angles = gqa.rotary_angles(positions, q.shape[-1] - own, 1e4, F32)

        turned = gqa.apply_rotary(cache[:, :, None, width:], angles, F32)[:, :, 0]
        turned = jnp.concatenate([cache[..., :width], turned], axis=-1)
        cache = switches.pick("MLA: rotary embedding on the shared key dims", turned, cache)
        narrow = (q.shape[-1] / own) ** 0.5
        q = switches.pick("MLA: scale of the own dims", narrow * q, q)
        return right(q, cache, up, positions, numerics)

    return attend


def open_gate(right, switches):
    return lambda out, gate, n: switches.pick("MLA: no output gate", out, right(out, gate, n))


def routes(right, switches):
    def choose(scores, bias, rule):
        found = right(scores, bias, rule)
        biased = jnp.take_along_axis(scores + bias, found.experts, axis=1)
        biased /= biased.sum(axis=1, keepdims=True)
        raw = jnp.take_along_axis(scores, found.experts, axis=1)
        weights = switches.pick("router: weights from biased scores", biased, found.weights)
        weights = switches.pick("router: no renormalisation", raw, weights)
        weights = switches.pick("router: scaled weights", 2.5 * found.weights, weights)
        return replace(found, weights=weights)

    return choose


def latent_norm(right, switches):
    return lambda x, *rest: switches.pick("latent mixture: no norm", x, right(x, *rest))


PATCHES = [
    (norm, "stepwise_rms_norm", lora_eps),
    (norm, "sigmoid_gated_rms_norm", output_norm),
    (residual, "mix", mixture),
    (reference._Residual, "close_block", continued_block),
    (moe.latent, "situ", activation),
    (kda, "gates", decay),
    (kda, "unit_heads", query_scale),
    (kda, "causal_convolution", convolution),
    (mla, "expanded_attention", attention),
    (mla, "output_gate", open_gate),
    (moe.latent, "choose", routes),
    (moe.latent, "stepwise_rms_norm", latent_norm),
]

# What the third party's logits moved by, on average, when its model was broken so.
SWITCHED = {
    "lora norms: eps of the others": 7.823e-05,
    "KDA: o_norm eps 1e-6": 0.9306,
    "residual: scores of raw states": 2.174,
    "residual: normalised values": 2.240,
    "residual: plain sum": 2.283,
    "residual: last mix left out": 2.108,
    "residual: prefix not restarted": 1.399,
    "SiTU: sigmoid of the capped gate": 0.3071,
    "SiTU: no cap on up": 0.1810,
    "SiTU: SwiGLU": 1.527,
    "SiTU: gate and up swapped": 2.680,
    "KDA: softplus gate": 2.168,
    "KDA: dt_bias after the factor": 2.140,
    "KDA: no query scale": 1.034,
    "KDA: output gate SiLU": 2.336,
    "KDA: output gate before the norm": 1.388,
    "KDA: no SiLU after the convolution": 2.420,
    "MLA: scale of the own dims": 0.05721,
    "MLA: no output gate": 0.1723,
    "MLA: rotary embedding on the shared key dims": 0.01214,
    "router: weights from biased scores": 0.2021,
    "router: no renormalisation": None,
    "router: scaled weights": None,
    "latent mixture: no norm": 2.488,
}

VARIANTS = {"residual: prefix not restarted"}
"""Not made at the same place in detail as the third party's."""


def change(suffix, wrong):
    """A mistake that is one in how tensors are read."""
    return lambda tensors: {
        name: wrong(array) if name.endswith(suffix) else array for name, array in tensors.items()
    }


def through_bf16(array):
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def swapped_nibbles(matrix):
    pairs = matrix.reshape(*matrix.shape[:-1], -1, 2)
    return pairs[..., ::-1].reshape(matrix.shape)


def swapped_experts(tensors):
    names = {name: name.replace(".w1.", ".w0.").replace(".w3.", ".w1.") for name in tensors}
    return {name.replace(".w0.", ".w3."): tensors[old] for old, name in names.items()}


EXPERTS = tuple(f"experts.{matrix}.weight" for matrix in ("w1", "w2", "w3"))
SMALL = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight")
READ = {
    "residual: norm weight left out": (change("res_norm.weight", np.ones_like), 1.292),
    "KDA: exp(A_log) left out": (change("A_log", np.zeros_like), 2.057),
    "KDA: dt_bias left out": (change("dt_bias", np.zeros_like), 2.307),
    "KDA: taps reversed": (change("conv1d.weight", lambda w: w[..., ::-1]), 2.514),
    "router: bias ignored": (change("e_score_correction_bias", np.zeros_like), 0.7450),
    "no shared experts": (change("shared_experts.down_proj.weight", np.zeros_like), 2.396),
    "small vectors rounded to bf16": (change(SMALL, through_bf16), 0.05468),
    "MXFP4: nibbles swapped": (change(EXPERTS, swapped_nibbles), 1.333),
    "experts: w1 and w3 swapped": (swapped_experts, 1.090),
}


@pytest.fixture(scope="module")
def program(tiny_config):
    """(tensors, tokens, which switched mistake or -1) -> logits and router weights."""

    def forward(tensors, tokens, on):
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, wrong in PATCHES:
                patch.setattr(owner, name, wrong(getattr(owner, name), Switches(on, patch)))
            logits, trace = reference.forward(tiny_config, F32, tensors, tokens)
        return logits, jnp.stack(trace.router_weights)

    return jax.jit(forward, compiler_options={"xla_backend_optimization_level": 1})


@pytest.fixture(scope="module")
def errors(program, golden, tiny_tensors):
    tokens = golden["len70/input_ids"]

    def compare(tensors=tiny_tensors, on=-1):
        logits, router = program(tensors, tokens, on)
        return (
            np.abs(np.asarray(logits) - golden["len70/fp32/logits"]),
            np.abs(np.asarray(router) - golden["len70/fp32/router_weights_dense"]),
        )

    return compare


def test_without_a_mistake_nothing_moves(errors):
    logits, router = errors()
    assert logits.max() < MAX_LOGIT_ERROR
    assert logits.mean() < MEAN_LOGIT_ERROR
    assert router.max() < ROUTER_ERROR


def assert_costs(error, expected, allowed=0.02):
    """Beyond the tolerance, and by what the same mistake cost the third party."""
    assert error.max() > 2 * MAX_LOGIT_ERROR
    assert error.mean() > 2 * MEAN_LOGIT_ERROR
    np.testing.assert_allclose(error.mean(), expected, rtol=allowed)


@pytest.mark.parametrize("mistake", [name for name, cost in SWITCHED.items() if cost])
def test_a_mistake_in_the_maths_is_caught(mistake, errors):
    error, _ = errors(on=list(SWITCHED).index(mistake))
    assert_costs(error, SWITCHED[mistake], 0.1 if mistake in VARIANTS else 0.02)


@pytest.mark.parametrize("mistake", READ)
def test_a_mistake_in_reading_is_caught(mistake, errors, tiny_tensors):
    wrong, expected = READ[mistake]
    assert_costs(errors(wrong(tiny_tensors))[0], expected)


@pytest.mark.parametrize("mistake", [name for name, cost in SWITCHED.items() if not cost])
def test_a_mistake_that_the_latent_norm_hides_is_caught_by_the_router_weights(mistake, errors):
    logits, router = errors(on=list(SWITCHED).index(mistake))
    assert logits.max() < MAX_LOGIT_ERROR
    assert router.max() > 1000 * ROUTER_ERROR


def test_blocks_of_another_size_are_caught(golden, tiny_config, tiny_tensors):
    longer = replace(tiny_config, attn_res_block_size=tiny_config.attn_res_block_size + 1)
    forward = jax.jit(
        lambda tensors, tokens: reference.forward(longer, F32, tensors, tokens)[0],
        compiler_options=quick_options(same_bits=True),
    )
    logits = forward(tiny_tensors, golden["len70/input_ids"])
    assert_costs(np.abs(np.asarray(logits) - golden["len70/fp32/logits"]), 1.495)
