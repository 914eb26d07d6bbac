"""Rows, chunks, verify and commit, snapshots: what the backend promises beyond right numbers."""

import numpy as np
import pytest
from kda_mla_kernels.testing import Sequence

STEPS = 9
CHUNK = 16  # the shortest program, for prompts of any length


@pytest.fixture(scope="module")
def model(load_tiny):
    return load_tiny(1, short=True, feature_layers=tuple(range(5)))


@pytest.fixture(scope="module")
def decoded(model, golden, state_of_row):
    """Logits and states of 9 tokens after a 7-token prompt, one token at a time."""
    run = Sequence(model, row=1)
    logits = [run.prefill(golden["len7/input_ids"], all_logits=True)[-1][-1]]
    states = [state_of_row(run.state, 1, run.position)]
    for token in golden["len7/fp32/greedy_tokens"][:STEPS]:
        logits.append(run.decode(token))
        states.append(state_of_row(run.state, 1, run.position))
    return logits, states


def assert_states_near(ours, other):
    for name, part in ours.items():
        np.testing.assert_allclose(part, other[name], rtol=0, atol=1e-4, err_msg=name)


def assert_states_equal(ours, other):
    for name, part in ours.items():
        np.testing.assert_array_equal(part, other[name], err_msg=name)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_any_chunk_size_gives_the_same_logits_and_state(load_tiny, golden, state_of_row, chunk):
    model = load_tiny(1, short=True, rough=True)
    whole, parts = Sequence(model), Sequence(model)
    tokens = golden["len70/input_ids"][: 16 if chunk == 1 else 70]
    expected = whole.prefill(tokens, all_logits=True)[-1][-1]
    logits = parts.prefill(tokens, chunk, all_logits=True)[-1][-1]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)
    assert_states_near(*(state_of_row(run.state, 0, len(tokens)) for run in (parts, whole)))


def test_prefill_leaves_the_state_of_one_token_decoding(model, golden, state_of_row, decoded):
    tokens = [*golden["len7/input_ids"], *golden["len7/fp32/greedy_tokens"][:STEPS]]
    run = Sequence(model, row=4)
    logits = run.prefill(tokens, all_logits=True)[-1][-1]
    np.testing.assert_allclose(logits, decoded[0][STEPS], rtol=0, atol=1e-3)
    assert_states_near(state_of_row(run.state, 4, 16), decoded[1][STEPS])


def test_a_row_has_the_same_bits_alone_and_beside_others_of_any_length(model, golden, decoded):
    """Row 1 repeats the recorded run while rows 0, 2 and 5 hold other prompts."""
    run, rows = Sequence(model), model.info.max_rows
    prompts = {0: golden["len70/input_ids"], 1: golden["len7/input_ids"], 2: [5], 5: [9] * 15}
    for row, prompt in prompts.items():
        run.row, run.position = row, 0
        run.prefill(prompt, CHUNK, all_logits=True)
    state = run.state
    positions = np.array([len(prompts.get(row, [])) for row in range(rows)])
    active = np.isin(np.arange(rows), list(prompts))
    tokens = np.full(rows, 17)
    for step in range(STEPS):
        tokens[1] = golden["len7/fp32/greedy_tokens"][step]
        out = model.decode(state, tokens, positions + step, active, with_logits=True)
        state = out.state
        np.testing.assert_array_equal(np.asarray(out.logits)[1], decoded[0][step + 1])
        assert (np.asarray(out.tokens)[~active] == -1).all()


def test_rows_that_are_not_active_keep_their_state_bit_for_bit(model, golden, state_of_row):
    run = Sequence(model, row=3)
    run.prefill(golden["len70/input_ids"], CHUNK, all_logits=True)
    before = state_of_row(run.state, 3, 256)
    run.row, run.position = 0, 0
    run.decode(5)
    assert_states_equal(state_of_row(run.state, 3, 256), before)


@pytest.mark.parametrize("accepted", range(9))
def test_verify_and_commit_have_the_bits_of_one_token_decoding(
    model, golden, state_of_row, decoded, accepted
):
    logits, states = decoded
    run = Sequence(model, row=1)
    run.prefill(golden["len7/input_ids"], all_logits=True)
    block = golden["len7/fp32/greedy_tokens"][:8].copy()
    block[accepted:] = 300  # rejected drafts leave no trace
    verified = run.verify(block)
    for t in range(accepted):
        np.testing.assert_array_equal(verified[t], logits[t + 1])
    run.commit(accepted)
    assert_states_equal(state_of_row(run.state, 1, 7 + accepted), states[accepted])
    if accepted < 8:  # and the next token overwrites what rejected ones wrote
        token = golden["len7/fp32/greedy_tokens"][accepted]
        np.testing.assert_array_equal(run.decode(token), logits[accepted + 1])


def test_two_sequences_are_verified_at_once(model, golden, state_of_row, decoded):
    logits, states = decoded
    state = model.init_state()
    for row in (6, 1):
        state = model.prefill(state, row, golden["len7/input_ids"], 0, all_logits=True).state
    tokens = golden["len7/fp32/greedy_tokens"][:4]
    out = model.verify(state, [6, 1], [tokens, [tokens[0], 8, 8, 8]], [7, 7])
    for t in range(4):
        np.testing.assert_array_equal(np.asarray(out.logits)[0, t], logits[t + 1])
    np.testing.assert_array_equal(np.asarray(out.logits)[1, 0], logits[1])
    assert out.features.shape == (2, 4, 5, 256)
    whole = model.prefill(
        model.init_state(), 0, [*golden["len7/input_ids"], *tokens], 0, all_logits=True
    )
    np.testing.assert_allclose(out.features[0], whole.features[7:], rtol=0, atol=1e-3)
    state = model.commit(out.state, [3, 1])
    for row, count in ((6, 3), (1, 1)):
        assert_states_equal(state_of_row(state, row, 7 + count), states[count])


def test_a_snapshot_restores_into_another_row_and_a_reset_row_starts_anew(
    model, golden, state_of_row
):
    run = Sequence(model, row=2)
    first = run.prefill(golden["len70/input_ids"], CHUNK, all_logits=True)[-1]
    saved = model.snapshot(run.state, 2, 70)
    before = state_of_row(run.state, 2, 70)
    expected = run.decode(11)
    run.state, run.position = model.reset(run.state, 2), 0
    assert not any(part.any() for part in state_of_row(run.state, 2, 256).values())
    np.testing.assert_array_equal(
        run.prefill(golden["len70/input_ids"], CHUNK, all_logits=True)[-1], first
    )
    run.state, run.row, run.position = model.restore(run.state, 7, saved), 7, 70
    assert_states_equal(state_of_row(run.state, 7, 70), before)
    np.testing.assert_array_equal(run.decode(11), expected)


def state_after_verify(model):
    tokens = [[1] * 4, [2] * 4]
    return model.verify(model.init_state(), [0, 1], tokens, [0, 0]).state


WRONG_CALLS = {
    "token id 512 lies outside 0..511": lambda m: m.prefill(m.init_state(), 0, [512], 0),
    "do not fit a context of 256": lambda m: m.prefill(m.init_state(), 0, [1] * 10, 250),
    "position 256 lies outside": lambda m: m.decode(m.init_state(), [1] * 8, [256] * 8, [True] * 8),
    "exceed 8 rows": lambda m: m.verify(m.init_state(), [0, 1], [[1] * 5] * 2, [0, 0]),
    "call commit first": lambda m: m.prefill(state_after_verify(m), 0, [1], 0),
    "counts in 0..4": lambda m: m.commit(state_after_verify(m), [5, 0]),
    "restore takes what snapshot returned": lambda m: m.restore(m.init_state(), 0, None),
}


@pytest.mark.parametrize("message", WRONG_CALLS)
def test_a_wrong_call_says_what_is_wrong(model, message):
    with pytest.raises(ValueError, match=message):
        WRONG_CALLS[message](model)
