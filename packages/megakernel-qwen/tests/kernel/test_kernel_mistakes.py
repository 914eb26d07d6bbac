"""Mistakes planted in the kernel's stages, one at a time, move its logits out of tolerance.

A model of two layers, one of each kind, is enough: the golden outputs hold the structure of more.
Mistakes of tensors are planted in the reader, which all backends share, by ``test_loading``.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.attention import sweep
from kda_mla_kernels.delta.kernel import stage as delta_stage
from kda_mla_kernels.gdn.kernel import stage as gdn_stage
from kda_mla_kernels.gqa.kernel import stage as gqa_stage
from kda_mla_kernels.mlp import kernel as mlp_stage
from kda_mla_kernels.norm import rms_norm
from megakernel_qwen import package
from megakernel_qwen.kernel import step

from ..small import random_tensors, reference_logits, small_config, write

TOKENS = [3, 41, 17, 5, 29, 3]
TOLERANCE = 2e-4
SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory, compiled_quickly):
    config = small_config(**SIZES)
    folder = write(tmp_path_factory.mktemp("small") / "model", config, random_tensors(config))
    options = {"backend": "megakernel", "numerics": "f32", "max_context": 128}
    return compiled_quickly(package.load(folder, **options))


@pytest.fixture(scope="module")
def expected():
    config = small_config(**SIZES)
    return reference_logits(config, random_tensors(config), TOKENS)


@pytest.fixture
def error(model, expected):
    """Measures the largest error of a kernel that is traced now."""

    def measured():
        # Another instance has programs of its own.
        traced_now = replace(model, programs=replace(model.programs))
        out = traced_now.verify(model.init_state(), [0], [TOKENS], [0])
        return np.abs(np.asarray(out.logits)[0] - expected).max()

    return measured


def test_without_a_mistake_the_logits_are_those_of_the_reference(error):
    assert error() < TOLERANCE


def plain_gain(right):
    return lambda x, gain, eps, numerics: right(x, gain - 1.0, eps, numerics)


def sigmoid_gate(_):
    def wrong(x, gate, weight, eps, numerics):
        return rms_norm(x, weight, eps, numerics) * jax.nn.sigmoid(gate)

    return wrong


def gate_before_norm(_):
    def wrong(x, gate, weight, eps, numerics):
        return rms_norm(x * jax.nn.silu(gate), weight, eps, numerics)

    return wrong


def zero_centred(right):
    return lambda x, gate, weight, eps, numerics: right(x, gate, 1 + weight, eps, numerics)


def no_decay(right):
    return lambda *args: (jnp.zeros_like(right(*args)[0]), right(*args)[1])


def doubled_beta(right):
    return lambda *args: (right(*args)[0], 2 * right(*args)[1])


def raw_rate(right):
    return lambda a, b, a_log, *rest: right(a, b, jnp.log(jnp.abs(a_log)), *rest)


def reversed_taps(right):
    def wrong(block, tails, inputs, taps, numerics):
        turned = jnp.concatenate([taps[i : i + 1] for i in reversed(range(taps.shape[0]))])
        return right(block, tails, inputs, turned, numerics)

    return wrong


def output_of_the_old_state(right):
    def wrong(decayed, x):
        state, _, update = right(decayed, x)
        return state, jnp.sum(decayed * x.query, axis=0, keepdims=True), update

    return wrong


def interleaved(_):
    def wrong(x, angles, rotary_dim, numerics):
        turned = jnp.stack([-x[..., 1:rotary_dim:2], x[..., 0:rotary_dim:2]], axis=-1)
        swapped = jnp.concatenate(
            [turned.reshape(*x.shape[:-1], rotary_dim), x[..., rotary_dim:]], axis=-1
        )
        return x * angles[0] + swapped * jnp.abs(angles[1])

    return wrong


def blind_to_itself(right):
    """A query does not see its own token."""

    def wrong(running, scores, values, visible, numerics):
        shifted = jnp.concatenate([visible[:, 1:], jnp.zeros_like(visible[:, :1])], axis=1)
        return right(running, scores, values, shifted, numerics)

    return wrong


def gelu(_):
    return lambda gate, up, numerics: jax.nn.gelu(gate) * up


MISTAKES = {
    "gain w instead of 1 + w": (step, "rms_norm", plain_gain),
    "head gain w instead of 1 + w": (gqa_stage, "rms_norm", plain_gain),
    "gated norm gain 1 + w": (gdn_stage, "gated_rms_norm", zero_centred),
    "gated norm sigmoid": (gdn_stage, "gated_rms_norm", sigmoid_gate),
    "gate before the norm": (gdn_stage, "gated_rms_norm", gate_before_norm),
    "no L2 norm": (delta_stage, "l2_norm", lambda _: lambda x: x),
    "no decay": (gdn_stage, "gates_of", no_decay),
    "beta in (0, 2)": (gdn_stage, "gates_of", doubled_beta),
    "no exp of A_log": (gdn_stage, "gates_of", raw_rate),
    "taps reversed": (delta_stage, "convolve_rows", reversed_taps),
    "output of the old state": (delta_stage, "delta_rule", output_of_the_old_state),
    "no rotation": (gqa_stage, "turn", lambda _: lambda x, *rest: x),
    "interleaved rotation": (gqa_stage, "turn", interleaved),
    "blind to itself": (sweep, "add_tile", blind_to_itself),
    "no output gate": (gqa_stage, "output_gate", lambda _: lambda out, gate, numerics: out),
    "GELU": (mlp_stage, "swiglu", gelu),
}


SLOW = (
    "gated norm sigmoid",
    "gate before the norm",
    "beta in (0, 2)",
    "no exp of A_log",
    "no rotation",
)
"""Others of the same functions stay in the fast set."""


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in MISTAKES],
)
def test_a_planted_mistake_is_caught(mistake, monkeypatch, error):
    module, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    assert error() > 20 * TOLERANCE
