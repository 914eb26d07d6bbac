"""What the kernel promises beyond right numbers: bits that depend only on a row's own tokens.

One rank in the interpreter that simulates memory: what is compiled between two touches of it does
not depend on the shape of the block, as on a TPU. (Pallas' own interpreter makes one XLA program of
a kernel, which fuses differently for every shape.) The exchanges that several ranks add are
bit-equal by their own tests.
"""

import numpy as np
import pytest
from kda_mla_kernels.sampling import Sampling, SamplingParams

TOKENS = 3


@pytest.fixture(scope="module")
def model(load_kernel):
    return load_kernel(1, simulated=True)


@pytest.fixture(scope="module")
def decoded(model, golden, sequence, state_of_row):
    """Logits and states of 5 tokens after a 7-token prompt, one token at a time."""
    run = sequence(model, row=1)
    run.prefill(golden["len7/input_ids"])
    logits, states = [], [state_of_row(run.state, 1, run.position)]
    for token in golden["len7/fp32/greedy_tokens"][:5]:
        logits.append(run.decode(token))
        states.append(state_of_row(run.state, 1, run.position))
    return logits, states


def test_decoding_gives_the_golden_logits(decoded, golden):
    expected = golden["len7/fp32/greedy_logits"][1:6]
    np.testing.assert_allclose(np.stack(decoded[0]), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("accepted", range(TOKENS + 1))
def test_verify_and_commit_have_the_bits_of_one_token_decoding(
    model, golden, sequence, state_of_row, decoded, accepted
):
    logits, states = decoded
    run = sequence(model, row=1)
    run.prefill(golden["len7/input_ids"])
    block = golden["len7/fp32/greedy_tokens"][:TOKENS].copy()
    block[accepted:] = 300  # rejected drafts leave no trace
    verified = run.verify(block)
    for t in range(accepted):
        np.testing.assert_array_equal(verified[t], logits[t])
    run.commit(accepted)
    for name, part in state_of_row(run.state, 1, 7 + accepted).items():
        np.testing.assert_array_equal(part, states[accepted][name], err_msg=name)
    token = golden["len7/fp32/greedy_tokens"][accepted]
    np.testing.assert_array_equal(run.decode(token), logits[accepted])


def test_two_sequences_are_verified_at_once(model, golden, state_of_row, decoded):
    logits, states = decoded
    state = model.init_state()
    for row in (6, 1):
        state = model.prefill(state, row, golden["len7/input_ids"], 0).state
    tokens = golden["len7/fp32/greedy_tokens"][:TOKENS]
    out = model.verify(state, [6, 1], [tokens, [tokens[0], 8, 8]], [7, 7])
    for t in range(TOKENS):
        np.testing.assert_array_equal(np.asarray(out.logits)[0, t], logits[t])
    np.testing.assert_array_equal(np.asarray(out.logits)[1, 0], logits[0])
    state = model.commit(out.state, [2, 1])
    for row, count in ((6, 2), (1, 1)):
        for name, part in state_of_row(state, row, 7 + count).items():
            np.testing.assert_array_equal(part, states[count][name], err_msg=name)


def test_a_row_has_the_same_bits_beside_others_of_any_length(model, golden, decoded, state_of_row):
    state, rows = model.init_state(), model.info.max_rows
    prompts = {0: golden["len70/input_ids"], 1: golden["len7/input_ids"], 2: [5], 5: [9] * 33}
    for row, prompt in prompts.items():
        state = model.prefill(state, row, prompt, 0).state
    idle = state_of_row(state, 4, 8)
    positions = np.array([len(prompts.get(row, [])) for row in range(rows)])
    active = np.isin(np.arange(rows), list(prompts))
    tokens = np.full(rows, 17)
    for step in range(3):
        tokens[1] = golden["len7/fp32/greedy_tokens"][step]
        out = model.decode(state, tokens, positions + step, active, with_logits=True)
        state = out.state
        np.testing.assert_array_equal(np.asarray(out.logits)[1], decoded[0][step])
        assert (np.asarray(out.tokens)[~active] == -1).all()
    for name, part in state_of_row(state, 4, 8).items():
        np.testing.assert_array_equal(part, idle[name], err_msg=name)


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.slow), 16])
def test_a_row_has_the_same_bits_in_another_batch(load_kernel, golden, sequence, decoded, rows):
    run = sequence(load_kernel(1, max_rows=rows, simulated=True), row=rows - 1)
    run.prefill(golden["len7/input_ids"])
    for token, expected in zip(golden["len7/fp32/greedy_tokens"][:2], decoded[0]):
        np.testing.assert_array_equal(run.decode(token), expected)


def test_sampled_tokens_are_those_of_the_xla_backend(model, load_tiny, golden):
    """Sampling works on logits that agree to rounding; these seeds keep away from ties."""
    rows = model.info.max_rows
    sampling = Sampling.of([SamplingParams(temperature=1.0, top_k=50, seed=s) for s in range(rows)])
    drawn = []
    for one in (model, load_tiny(1)):
        state = one.init_state()
        state = one.prefill(state, 0, golden["len7/input_ids"], 0).state
        tokens, positions = np.full(rows, 4), np.full(rows, 7)
        out = one.decode(state, tokens, positions, np.arange(rows) == 0, sampling)
        drawn.append(np.asarray(out.tokens))
    np.testing.assert_array_equal(*drawn)


def test_too_many_rows_are_refused(load_kernel):
    with pytest.raises(ValueError, match="at most 16 rows, not 17"):
        load_kernel(1, max_rows=17)
