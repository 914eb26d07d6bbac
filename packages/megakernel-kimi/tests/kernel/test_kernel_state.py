"""What a step leaves behind, and that a row's bits are its own."""

import numpy as np
import pytest
from kda_mla_kernels.testing import Sequence

TOKENS = 3
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def model(load_kernel):
    return load_kernel(1, exact_bits=True, max_rows=4)


@pytest.fixture(scope="module")
def decoded(model, golden, state_of_row):
    """Logits and state after each token of a prompt, one at a time."""
    run, logits, states = Sequence(model, row=1), [], []
    for count, token in enumerate(golden["len7/input_ids"][: TOKENS + 1], start=1):
        logits.append(run.decode(token))
        states.append(state_of_row(run.state, 1, count))
    return logits, states


def assert_equal(ours, other):
    for name, part in ours.items():
        np.testing.assert_array_equal(part, other[name], err_msg=name)


@pytest.mark.parametrize(
    "accepted", [pytest.param(0, marks=slow), 1, pytest.param(2, marks=slow), 3]
)
def test_verify_and_commit_have_the_bits_of_one_token_decoding(
    model, golden, decoded, state_of_row, accepted
):
    first, *block = golden["len7/input_ids"][: TOKENS + 1]
    run = Sequence(model, row=1)
    run.decode(first)
    np.testing.assert_array_equal(run.verify(block), decoded[0][1:])
    run.commit(accepted)
    kept = 1 + accepted
    assert_equal(state_of_row(run.state, 1, kept), decoded[1][kept - 1])


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=slow)])
def test_a_row_has_the_same_bits_in_another_batch(load_kernel, golden, decoded, rows):
    run = Sequence(load_kernel(1, exact_bits=True, max_rows=rows), row=rows - 1)
    for token, expected in zip(golden["len7/input_ids"][:2], decoded[0]):
        np.testing.assert_array_equal(run.decode(token), expected)


def test_a_row_has_the_same_bits_beside_others(model, golden, decoded):
    tokens, others = golden["len7/input_ids"], golden["len70/input_ids"]
    run = Sequence(model)
    for at in range(2):
        fed = [*others[4 * at : 4 * at + 4]]
        fed[1] = tokens[at]
        out = model.decode(run.state, fed, [at] * 4, [True] * 4, with_logits=True)
        run.state = out.state
        np.testing.assert_array_equal(np.asarray(out.logits)[1], decoded[0][at])


def test_rows_that_are_not_active_keep_their_state(model, golden, decoded, state_of_row):
    run = Sequence(model, row=1)
    for token in golden["len7/input_ids"][:2]:
        run.decode(token)
    before = state_of_row(run.state, 1, 2)
    other = Sequence(model, row=3)
    other.state = run.state
    other.decode(7)
    assert_equal(state_of_row(other.state, 1, 2), before)


@slow
def test_steps_in_one_call_have_the_bits_of_single_steps(model, golden, state_of_row):
    single, fed = Sequence(model, row=1), [golden["len1/input_ids"][0]]
    for _ in range(TOKENS):
        fed.append(single.decode(fed[-1]).argmax())
    active = np.arange(4) == 1
    first, positions = np.full(4, fed[0]), np.zeros(4, int)
    out = model.decode_steps(model.init_state(), first, positions, active, TOKENS)
    np.testing.assert_array_equal(np.asarray(out.tokens)[:, 1], fed[1:])
    assert_equal(state_of_row(out.state, 1, TOKENS), state_of_row(single.state, 1, TOKENS))
