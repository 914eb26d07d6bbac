"""What the kernel promises beyond right numbers: bits that depend only on a row's own tokens.

One rank in the interpreter that simulates memory: what is compiled between two touches of it does
not depend on the shape of the block, as on a TPU. (Pallas' own interpreter makes one XLA program of
a kernel, which fuses differently for every shape.) The exchanges that several ranks add are
bit-equal by their own tests.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.sampling import Sampling, SamplingParams, sample

TOKENS = 3
CHUNK = 16  # the shortest prefill program, for prompts of any length


@pytest.fixture(scope="module")
def model(load_kernel):
    return load_kernel(1, simulated=True)


@pytest.fixture(scope="module")
def prompted(model, golden, sequence):
    """A snapshot after the 7-token prompt, for models whose prefill need not be compiled."""
    run = sequence(model, row=1)
    run.prefill(golden["len7/input_ids"])
    return model.snapshot(run.state, 1, 7)


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


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param((1,), id="alone", marks=pytest.mark.slow),
        pytest.param((6, 1), id="beside another"),
    ],
)
@pytest.mark.parametrize("accepted", range(TOKENS + 1))
def test_verify_and_commit_have_the_bits_of_one_token_decoding(
    model, golden, sequence, state_of_row, prompted, decoded, rows, accepted
):
    logits, states = decoded
    run, tokens = sequence(model, row=1), golden["len7/fp32/greedy_tokens"]
    for row in rows:
        run.state = model.restore(run.state, row, prompted)
    block = tokens[:TOKENS].copy()
    block[accepted:] = 300  # rejected drafts leave no trace
    blocks, counts = {1: block, 6: [tokens[0], 8, 8]}, {1: accepted, 6: 1}
    out = model.verify(run.state, rows, [blocks[row] for row in rows], [7] * len(rows))
    for row, verified in zip(rows, np.asarray(out.logits)):
        for t in range(counts[row]):
            np.testing.assert_array_equal(verified[t], logits[t])
    run.state = model.commit(out.state, [counts[row] for row in rows])
    run.position = 7 + accepted
    for row in rows:
        for name, part in state_of_row(run.state, row, 7 + counts[row]).items():
            np.testing.assert_array_equal(part, states[counts[row]][name], err_msg=name)
    np.testing.assert_array_equal(run.decode(tokens[accepted]), logits[accepted])


def test_a_row_has_the_same_bits_beside_others_of_any_length(
    model, golden, sequence, decoded, state_of_row
):
    run, rows = sequence(model), model.info.max_rows
    prompts = {0: golden["len70/input_ids"], 1: golden["len7/input_ids"], 2: [5], 5: [9] * 33}
    for row, prompt in prompts.items():
        run.row, run.position = row, 0
        run.prefill(prompt, CHUNK)
    state = run.state
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
def test_a_row_has_the_same_bits_in_another_batch(
    load_kernel, golden, sequence, prompted, decoded, rows
):
    run = sequence(load_kernel(1, max_rows=rows, simulated=True), row=rows - 1)
    run.state, run.position = run.model.restore(run.state, run.row, prompted), 7
    for token, expected in zip(golden["len7/fp32/greedy_tokens"][:2], decoded[0]):
        np.testing.assert_array_equal(run.decode(token), expected)


def test_both_interpreters_give_the_same_logits(load_kernel, golden, sequence, prompted, decoded):
    """One rank runs in Pallas' own interpreter by default; the one of this file simulates DMAs."""
    run = sequence(load_kernel(1, max_rows=2), row=1)
    run.state, run.position = run.model.restore(run.state, 1, prompted), 7
    for token, expected in zip(golden["len7/fp32/greedy_tokens"][:2], decoded[0]):
        # The same operations, compiled in pieces of other sizes: a product may fuse into a sum.
        np.testing.assert_allclose(run.decode(token), expected, rtol=0, atol=2e-5)


def test_tokens_are_drawn_from_the_logits_where_all_of_them_decide(model, golden, prompted):
    rows, row = model.info.max_rows, 2
    sampling = Sampling.of([SamplingParams(temperature=2.0, seed=seed) for seed in range(rows)])
    state = model.restore(model.init_state(), row, prompted)
    active = np.arange(rows) == row
    out = model.decode(state, [4] * rows, [7] * rows, active, sampling, with_logits=True)
    drawn = sample(out.logits, sampling, jnp.full(rows, 8))
    np.testing.assert_array_equal(out.tokens, np.where(active, drawn, -1))
    assert drawn[row] != np.argmax(out.logits[row])


def test_too_many_rows_are_refused(load_kernel):
    with pytest.raises(ValueError, match="at most 16 rows, not 17"):
        load_kernel(1, max_rows=17)
