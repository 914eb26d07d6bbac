"""The decode kernel against K3's own outputs, on 1, 2 and 8 ranks.

A whole short prompt goes through the kernel as one block, which gives the logits and prefixes of
all its tokens at once, and its commit the states.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.moe.kernel import RoutedExperts
from kda_mla_kernels.numerics import BF16
from kda_mla_kernels.residual.kernel import Residual
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
    params=[1, 2, 8],
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


@pytest.fixture(scope="module")
def inside(trace_kernel, golden):
    """What one rank computes on the way for a prompt: dense weights of the routes by layer of
    experts, and finished blocks by their number."""

    @cache
    def ran(n):
        weights, blocks = {}, {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RoutedExperts, "start", watched_start(weights))
            patch.setattr(Residual, "close_block", watched_close(blocks))
            model = trace_kernel()
            model.verify(model.init_state(), [ROW], [golden[f"len{n}/input_ids"]], [0])
        jax.effects_barrier()
        return weights, blocks

    return ran


def watched_start(seen):
    right = RoutedExperts.start

    def start(self, scratch, images, layer, *given):
        weights = right(self, scratch, images, layer, *given)
        note(seen, layer, weights)
        return weights

    return start


def watched_close(seen):
    right = Residual.close_block

    def close(self, scratch, index):
        note(seen, index, scratch.prefix[...])
        right(self, scratch, index)

    return close


def note(seen, key, rows):
    jax.debug.callback(lambda key, rows: seen.update({int(key): np.asarray(rows)}), key, rows)


def of_all_keys(seen, rows):
    """[keys, rows, ...] in order, without padded rows."""
    return np.stack([seen[key][:rows] for key in sorted(seen)])


@pytest.mark.parametrize("n", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_weights_of_routes_equal_the_golden(inside, golden, n):
    """The norm after the experts hides their scale from the logits; a row alone is routed in its
    own way."""
    weights, expected = of_all_keys(inside(n)[0], n), golden[f"len{n}/fp32/router_weights_dense"]
    assert weights.shape == expected.shape
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)


def test_finished_blocks_equal_the_golden(inside, golden):
    blocks, expected = of_all_keys(inside(7)[1], 7), golden["len7/fp32/block_residual"]
    assert blocks.shape == expected.shape
    np.testing.assert_allclose(blocks, expected, rtol=0, atol=2e-4 * expected.std())
    np.testing.assert_array_equal(blocks[0], golden["len7/fp32/embed"])


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


def test_tokens_of_steps_in_one_call_equal_the_golden(load_kernel, golden, state_of_row):
    """The kernel feeds what it chose, beside a row that is not active and stays empty."""
    model, steps = load_kernel(1, max_rows=2), 2
    (first,) = golden["len1/input_ids"]
    out = model.decode_steps(model.init_state(), [0, first], [0, 0], [False, True], steps)
    idle, tokens = np.asarray(out.tokens).T
    np.testing.assert_array_equal(tokens, golden["len1/fp32/greedy_tokens"][:steps])
    assert (idle == -1).all()
    for name, part in state_of_row(out.state, 0, steps).items():
        np.testing.assert_array_equal(part, 0, err_msg=name)


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
