"""Mistakes planted in the kernel, one at a time, move its logits out of tolerance.

Mistakes of tensors are planted in the reader, which all backends share, by ``test_loading``; those
of stages that the kernel shares with the reference, by ``test_reference_mistakes``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.kda.kernel import stage as kda_stage
from kda_mla_kernels.mla import MlaShape
from kda_mla_kernels.moe.kernel import stage as moe_stage
from kda_mla_kernels.residual.kernel import Residual
from megakernel_kimi.kernel import experts, mixers, plan
from megakernel_kimi.kernel.sums import ExpertSums

MAX_LOGIT_ERROR = 1e-3
slow = pytest.mark.slow


@pytest.fixture
def error(trace_kernel, golden):
    """Measures the largest error of a kernel that is traced now."""

    def measure():
        model = trace_kernel()
        out = model.verify(model.init_state(), [0], [golden["len7/input_ids"]], [0])
        return np.abs(np.asarray(out.logits)[0] - golden["len7/fp32/logits"]).max()

    return measure


def kept_prefix(right):
    def wrong(self, scratch, index):
        prefix = scratch.prefix[...]
        right(self, scratch, index)
        scratch.prefix[...] = prefix

    return wrong


def unnormalised(_):
    return lambda self, x: jnp.ones((len(x), 1), jnp.float32)


def no_gate(_):
    return lambda out, gate, numerics: out


def no_norm(_):
    return lambda refs, routed, gain: routed


def unbiased_choice(right):
    def wrong(self, scratch, images, layer, scores, bias, first=0):
        return right(self, scratch, images, layer, scores, jnp.zeros_like(bias), first)

    return wrong


def no_shared(right):
    def wrong(self, refs, routed, shared, use):
        return right(self, refs, routed, None if shared is None else 0 * shared, use)

    return wrong


def bias_after_slope(right):
    return lambda rate, slope, bias, bound: right(rate + bias / slope - bias, slope, bias, bound)


def uncapped(_):
    def wrong(gate, up, beta, linear_beta, numerics):
        capped = beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate)
        return numerics.round(capped * up)

    return wrong


def equal_weights(right):
    return lambda scores, chosen, rule: right(jnp.ones_like(scores), chosen, rule)


@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [
        pytest.param(Residual, "close_block", kept_prefix, id="prefix not restarted"),
        pytest.param(
            Residual, "_unit", unnormalised, id="scores of unnormalised states", marks=slow
        ),
        pytest.param(mixers, "output_gate", no_gate, id="no MLA output gate", marks=slow),
        pytest.param(experts, "_normed", no_norm, id="no norm of the experts' sum", marks=slow),
        pytest.param(ExpertSums, "start", no_shared, id="no shared experts", marks=slow),
        pytest.param(
            moe_stage.RoutedExperts,
            "start",
            unbiased_choice,
            id="bias not in the choice",
            marks=slow,
        ),
        pytest.param(moe_stage, "chosen_weights", equal_weights, id="equal route weights"),
        pytest.param(
            kda_stage, "bounded_log_decay", bias_after_slope, id="bias after slope", marks=slow
        ),
        pytest.param(plan, "situ", uncapped, id="no cap on the up branch", marks=slow),
    ],
)
def test_a_mistake_is_caught(monkeypatch, error, owner, name, mistake):
    monkeypatch.setattr(owner, name, mistake(getattr(owner, name)))
    assert error() > 2 * MAX_LOGIT_ERROR


@slow
def test_a_scale_from_the_own_dims_alone_is_caught(monkeypatch, error):
    monkeypatch.setattr(MlaShape, "scale", property(lambda shape: shape.key_dim**-0.5))
    assert error() > 2 * MAX_LOGIT_ERROR
