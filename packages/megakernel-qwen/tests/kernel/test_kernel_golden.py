"""The decode kernel on 1, 2 and 8 ranks against transformers' outputs and our reference.

The last tokens of a prompt go through the kernel in one block: that gives the logits and hidden
states of all of them at once, and their commit the states.
"""

from dataclasses import replace

import numpy as np
import pytest
from kda_mla_kernels.backend import CANDIDATES
from kda_mla_kernels.sampling import Sampling, SamplingParams, decided_by
from megakernel_qwen.layout import QwenLayout

ALL_LAYERS = tuple(range(8))
BLOCK = 8
CHUNK = 16  # the shortest prefill program, for all of a prompt
ROW = 3


@pytest.fixture(scope="module", params=[1, 2, 8], ids=lambda ranks: f"{ranks} ranks")
def block(request, load_kernel, golden, sequence):
    """A run whose last tokens went through the kernel, and what it made of them."""
    run = sequence(load_kernel(request.param, feature_layers=ALL_LAYERS), row=ROW)
    tokens = golden["len70/input_ids"]
    run.prefill(tokens[:-BLOCK], CHUNK)
    out = run.model.verify(run.state, [ROW], [tokens[-BLOCK:]], [run.position])
    run.state = run.model.commit(out.state, [BLOCK])
    run.position += BLOCK
    return run, np.asarray(out.logits)[0], np.asarray(out.features)[0]


@pytest.fixture(scope="module")
def xla_state(load_tiny, golden, sequence, state_of_row):
    """The XLA backend's state on one rank after the same prompt."""
    run = sequence(load_tiny(1, rough=True), row=ROW)
    run.prefill(golden["len70/input_ids"], CHUNK)
    return state_of_row(run.state, ROW, 70)


def test_logits_equal_the_golden(block, golden):
    error = np.abs(block[1] - golden["len70/fp32/logits"][-BLOCK:])
    assert error.max() < 2e-4
    assert error.mean() < 2e-5


def test_hidden_states_equal_the_golden(block, golden):
    expected = golden["len70/fp32/hidden"][1:]
    error = np.abs(np.moveaxis(block[2], 1, 0) - expected[:, -BLOCK:])
    assert error.max() < 2e-4 * expected.std()


def test_states_equal_the_golden(block, golden, tiny_config, state_of_row, channels_of_all_ranks):
    run = block[0]
    state = state_of_row(run.state, ROW, 70)
    tail = channels_of_all_ranks(QwenLayout(tiny_config, run.model.info.ranks), state["tail"])
    expected = golden["len70/fp32/gdn_conv_state"][..., 1:]  # the oldest column is spare
    np.testing.assert_allclose(np.moveaxis(tail, 1, 2), expected, rtol=0, atol=5e-5)
    delta = np.concatenate(list(state["delta"]), axis=1)  # ranks hold neighbouring heads
    expected = golden["len70/fp32/gdn_recurrent_state"]
    np.testing.assert_allclose(delta, expected, rtol=0, atol=3e-5)


def test_keys_and_values_are_those_of_the_xla_backend(block, xla_state, tiny_config, state_of_row):
    run = block[0]
    layout = QwenLayout(tiny_config, run.model.info.ranks)
    ours = state_of_row(run.state, ROW, 70)
    for rank in range(layout.ranks):
        first = layout.first_kv_head(rank)
        for name in ("keys", "values"):
            expected = xla_state[name][0, :, first : first + layout.kv_heads]
            np.testing.assert_allclose(ours[name][rank], expected, rtol=0, atol=5e-5, err_msg=name)


def test_greedy_tokens_equal_the_golden(load_kernel, golden, sequence):
    """The kernel's own choices, step after step on the device, on two ranks."""
    run = sequence(load_kernel(2, max_rows=ROW + 1), row=ROW)
    run.prefill(golden["len7/input_ids"])
    expected, steps = golden["len7/fp32/greedy_tokens"], 2
    rows = run.model.info.max_rows
    tokens, positions = np.zeros(rows, int), np.zeros(rows, int)
    tokens[ROW], positions[ROW] = expected[0], 7
    active = np.arange(rows) == ROW
    out = run.model.decode_steps(run.state, tokens, positions, active, steps)
    np.testing.assert_array_equal(np.asarray(out.tokens)[:, ROW], expected[1 : 1 + steps])
    assert (np.delete(np.asarray(out.tokens), ROW, axis=1) == -1).all()
    run.state, run.position = out.state, 7 + steps
    again = run.model.decode_steps(
        run.state, np.full(rows, expected[steps]), positions + steps, active, steps
    )
    np.testing.assert_array_equal(
        np.asarray(again.tokens)[:, ROW], expected[1 + steps : 1 + 2 * steps]
    )


def test_candidates_of_the_kernel_draw_what_the_xla_backend_draws(load_kernel, load_tiny, golden):
    """On two ranks, each of which lists its half of the vocabulary."""
    kernel, xla = load_kernel(2, max_rows=ROW + 1), load_tiny(2, rough=True, max_rows=ROW + 1)
    warm = SamplingParams(temperature=1.5, top_k=40, top_p=0.95)
    tokens = golden["len7/input_ids"]
    for seed in range(2):
        sampling = Sampling.of([replace(warm, seed=10 * seed + row) for row in range(ROW + 1)])
        assert decided_by(sampling, CANDIDATES)
        drawn = [
            model.decode(
                model.init_state(), tokens[: ROW + 1], [0] * (ROW + 1), [True] * (ROW + 1), sampling
            ).tokens
            for model in (kernel, xla)
        ]
        np.testing.assert_array_equal(*drawn)
        assert len(set(np.asarray(drawn[0]).tolist())) > 1


@pytest.mark.parametrize(
    ("ranks", "mean"), [(1, 0.03), pytest.param(2, 0.1, marks=pytest.mark.slow)]
)
def test_bf16_equals_the_reference_at_the_same_rounding_points(
    load_kernel, golden, bf16_logits, sequence, ranks, mean
):
    """Two ranks round their parts of a sum to bf16 before it, which the reference does not."""
    tokens = golden["len70/input_ids"]
    run = sequence(load_kernel(ranks, numerics="bf16"))
    run.prefill(tokens[:-BLOCK], CHUNK)
    error = np.abs(run.verify(tokens[-BLOCK:]) - bf16_logits[-BLOCK:])
    # Sums in another order move a value over a rounding border now and then, and the layers after
    # that carry it on; a missing or extra rounding point moves every value.
    assert error.mean() < mean
    assert error.max() < 0.4
