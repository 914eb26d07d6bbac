"""The decode kernel against K3's own outputs, on 1, 2 and 8 ranks.

A whole short prompt goes through the kernel as one block, which gives the logits and prefixes of
all its tokens at once, and its commit the states.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.numerics import BF16
from kda_mla_kernels.testing import Sequence
from megakernel_kimi import reference

MAX_LOGIT_ERROR, MEAN_LOGIT_ERROR = 1e-3, 3e-5
ALL_PREFIXES = tuple(range(8))  # before each of the 7 layers, and after the last
ROW = 2


def run_block(model, tokens):
    """A run that the tokens went through, their logits and their features."""
    run = Sequence(model, row=ROW)
    out = model.verify(run.state, [ROW], [tokens], [0])
    run.state, run.position = model.commit(out.state, [len(tokens)]), len(tokens)
    return run, np.asarray(out.logits)[0], np.asarray(out.features)[0]


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.slow), 8],
    ids=lambda ranks: f"{ranks} ranks",
)
def block(request, load_kernel, golden):
    model = load_kernel(request.param, feature_layers=ALL_PREFIXES)
    return run_block(model, golden["len7/input_ids"])


def test_logits_equal_the_golden(block, golden):
    error = np.abs(block[1] - golden["len7/fp32/logits"])
    assert error.max() < MAX_LOGIT_ERROR
    assert error.mean() < MEAN_LOGIT_ERROR


def test_prefixes_equal_the_golden(block, golden):
    prefixes = np.moveaxis(block[2], 1, 0)
    expected = golden["len7/fp32/prefix_sum"]
    np.testing.assert_allclose(prefixes[1:], expected, rtol=0, atol=2e-4 * expected.std())
    np.testing.assert_array_equal(prefixes[0], golden["len7/fp32/embed"])


def of_all_ranks(part, axis):
    """[ranks, ...] with a share of ``axis`` each -> all of it."""
    return np.concatenate(list(part), axis=axis)


def test_states_after_the_commit_equal_the_golden(block, golden, state_of_row):
    state = state_of_row(block[0].state, ROW, 7)
    for part, name in zip(np.split(state["tail"], 3, axis=-1), "qkv"):
        expected = golden[f"len7/fp32/kda_conv_state_{name}"][..., 1:]  # the oldest is spare
        ours = of_all_ranks(np.swapaxes(part, -1, -2), 1)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=5e-5)
    ours = of_all_ranks(np.swapaxes(state["delta"], -1, -2), 1)  # the golden's are [value, key]
    np.testing.assert_allclose(ours, golden["len7/fp32/kda_recurrent_state"], rtol=0, atol=3e-5)
    for latents, shared in zip(state["latents"], state["shared"]):
        rows = np.concatenate([latents, np.swapaxes(shared, 1, 2)], axis=-1)
        np.testing.assert_allclose(rows, golden["len7/fp32/mla_latent"], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_greedy_tokens_and_their_logits_equal_the_golden(load_kernel, golden):
    run, logits, _ = run_block(
        load_kernel(1, feature_layers=ALL_PREFIXES), golden["len7/input_ids"]
    )
    tokens, last = [], logits[-1]
    for expected in golden["len7/fp32/greedy_logits"][:5]:
        np.testing.assert_allclose(last, expected, rtol=0, atol=MAX_LOGIT_ERROR)
        tokens.append(int(last.argmax()))
        last = run.decode(tokens[-1])
    assert tokens == golden["len7/fp32/greedy_tokens"][:5].tolist()


@pytest.mark.slow
def test_a_prompt_prefilled_over_the_kernels_weights_has_the_golden_logits(load_kernel, golden):
    run = Sequence(load_kernel(1, feature_layers=ALL_PREFIXES))
    (logits,) = run.prefill(golden["len70/input_ids"], all_logits=True)
    error = np.abs(logits - golden["len70/fp32/logits"])
    assert error.max() < MAX_LOGIT_ERROR
    assert error.mean() < MEAN_LOGIT_ERROR


@pytest.mark.slow
def test_experts_in_fp8_give_the_same_logits(load_kernel, golden):
    tokens = golden["len7/input_ids"]
    ours = run_block(load_kernel(1, expert_form="fp8"), tokens)[1]
    error = np.abs(ours - golden["len7/fp32/logits"])
    assert error.max() < MAX_LOGIT_ERROR
    assert error.mean() < MEAN_LOGIT_ERROR


@pytest.mark.slow
def test_bf16_stays_as_close_to_the_golden_as_the_reference(
    load_kernel, golden, tiny_config, tiny_tensors
):
    tokens = golden["len7/input_ids"]
    ours = run_block(load_kernel(1, numerics="bf16"), tokens)[1]
    rounded, _ = reference.forward(tiny_config, BF16, tiny_tensors, jnp.asarray(tokens))
    expected = golden["len7/fp32/logits"]
    limit = 0.35
    assert np.abs(ours - expected).mean() < limit
    assert np.abs(ours - np.asarray(rounded)).mean() < limit
    assert np.mean(ours.argmax(-1) == np.asarray(rounded).argmax(-1)) >= 0.75
