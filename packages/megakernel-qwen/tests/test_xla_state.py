"""Rows, chunks, verify and commit, snapshots: what the backend promises beyond right numbers."""

from functools import cache

import jax
import numpy as np
import pytest
from kda_mla_kernels.sampling import Sampling, SamplingParams
from kda_mla_kernels.testing import recompiled
from tpu_collectives.testing import quick_options

FEATURES = (5, 1)
CHUNK = 16  # the shortest program, for prompts of any length


@pytest.fixture(scope="module")
def model(compiled_for_bits):
    return compiled_for_bits(1)


@pytest.fixture(scope="module")
def compiled_for_bits(load_tiny):
    """Models that compile quickly and fuse as they do by default, on which bits may depend."""

    @cache
    def load(ranks, **options):
        model = load_tiny(ranks, **{"feature_layers": FEATURES, **options})
        return recompiled(model, quick_options(same_bits=True))

    return load


@pytest.fixture(scope="module")
def decoded(model, golden, sequence, state_of_row):
    """Logits and states of 9 tokens after a 7-token prompt, one token at a time."""
    run = sequence(model, row=1)
    logits = [run.prefill(golden["len7/input_ids"])[-1]]
    states = [state_of_row(run.state, 1, run.position)]
    for token in golden["len7/fp32/greedy_tokens"][:9]:
        logits.append(run.decode(token))
        states.append(state_of_row(run.state, 1, run.position))
    return logits, states


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_any_chunk_size_gives_the_same_logits_and_state(
    load_tiny, golden, sequence, state_of_row, chunk
):
    model = load_tiny(1, rough=True)
    whole, parts = sequence(model), sequence(model)
    tokens = golden["len70/input_ids"][: 16 if chunk == 1 else 70]
    expected = whole.prefill(tokens)[-1]
    logits = parts.prefill(tokens, chunk)[-1]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    ours, other = (state_of_row(run.state, 0, len(tokens)) for run in (parts, whole))
    for name, part in ours.items():
        np.testing.assert_allclose(part, other[name], rtol=0, atol=5e-5, err_msg=name)


def test_prefill_leaves_the_state_of_one_token_decoding(
    model, golden, sequence, state_of_row, decoded
):
    tokens = [*golden["len7/input_ids"], *golden["len7/fp32/greedy_tokens"][:9]]
    run = sequence(model, row=4)
    np.testing.assert_allclose(run.prefill(tokens)[-1], decoded[0][9], rtol=0, atol=1e-4)
    ours = state_of_row(run.state, 4, 16)
    for name, part in ours.items():
        np.testing.assert_allclose(part, decoded[1][9][name], rtol=0, atol=5e-5, err_msg=name)


def test_a_row_has_the_same_bits_alone_and_beside_others_of_any_length(
    model, golden, sequence, decoded
):
    """Row 1 repeats the recorded run while rows 0, 2 and 5 hold other prompts."""
    run, rows = sequence(model), model.info.max_rows
    prompts = {0: golden["len70/input_ids"], 1: golden["len7/input_ids"], 2: [5], 5: [9] * 33}
    for row, prompt in prompts.items():
        run.row, run.position = row, 0
        run.prefill(prompt, CHUNK)
    state = run.state
    positions = np.array([len(prompts.get(row, [])) for row in range(rows)])
    active = np.isin(np.arange(rows), list(prompts))
    tokens = np.full(rows, 17)
    for step in range(9):
        tokens[1] = golden["len7/fp32/greedy_tokens"][step]
        out = model.decode(state, tokens, positions + step, active, with_logits=True)
        state = out.state
        np.testing.assert_array_equal(np.asarray(out.logits)[1], decoded[0][step + 1])
        assert (np.asarray(out.tokens)[~active] == -1).all()


def test_rows_that_are_not_active_keep_their_state_bit_for_bit(
    model, golden, sequence, state_of_row
):
    run = sequence(model, row=3)
    run.prefill(golden["len70/input_ids"], CHUNK)
    before = state_of_row(run.state, 3, 256)
    run.row, run.position = 0, 0
    run.decode(5)
    for name, part in state_of_row(run.state, 3, 256).items():
        np.testing.assert_array_equal(part, before[name], err_msg=name)


@pytest.mark.parametrize("accepted", range(9))
def test_verify_and_commit_have_the_bits_of_one_token_decoding(
    model, golden, sequence, state_of_row, decoded, accepted
):
    logits, states = decoded
    run = sequence(model, row=1)
    run.prefill(golden["len7/input_ids"])
    block = golden["len7/fp32/greedy_tokens"][:8].copy()
    block[accepted:] = 300  # rejected drafts leave no trace
    verified = run.verify(block)
    for t in range(accepted):
        np.testing.assert_array_equal(verified[t], logits[t + 1])
    run.commit(accepted)
    ours = state_of_row(run.state, 1, 7 + accepted)
    for name, part in ours.items():
        np.testing.assert_array_equal(part, states[accepted][name], err_msg=name)
    if accepted < 8:  # and the next token overwrites what rejected ones wrote
        token = golden["len7/fp32/greedy_tokens"][accepted]
        np.testing.assert_array_equal(run.decode(token), logits[accepted + 1])


def test_two_sequences_are_verified_at_once(model, golden, state_of_row, decoded):
    logits, states = decoded
    state = model.init_state()
    for row in (6, 1):
        state = model.prefill(state, row, golden["len7/input_ids"], 0).state
    tokens = golden["len7/fp32/greedy_tokens"][:4]
    out = model.verify(state, [6, 1], [tokens, [tokens[0], 8, 8, 8]], [7, 7])
    for t in range(4):
        np.testing.assert_array_equal(np.asarray(out.logits)[0, t], logits[t + 1])
    np.testing.assert_array_equal(np.asarray(out.logits)[1, 0], logits[1])
    assert out.features.shape == (2, 4, len(FEATURES), 256)
    whole = model.prefill(model.init_state(), 0, [*golden["len7/input_ids"], *tokens], 0)
    np.testing.assert_allclose(out.features[0], whole.features[7:], rtol=0, atol=2e-4)
    state = model.commit(out.state, [3, 1])
    for row, count in ((6, 3), (1, 1)):
        for name, part in state_of_row(state, row, 7 + count).items():
            np.testing.assert_array_equal(part, states[count][name], err_msg=name)


def test_a_snapshot_restores_into_another_row(model, golden, sequence, state_of_row):
    run = sequence(model, row=2)
    run.prefill(golden["len70/input_ids"], CHUNK)
    saved = model.snapshot(run.state, 2, 70)
    before = state_of_row(run.state, 2, 70)
    expected = run.decode(11)
    state = model.reset(run.state, 2)
    assert not state_of_row(state, 2, 0)["delta"].any()
    run.state, run.row, run.position = model.restore(state, 7, saved), 7, 70
    for name, part in state_of_row(run.state, 7, 70).items():
        np.testing.assert_array_equal(part, before[name], err_msg=name)
    np.testing.assert_array_equal(run.decode(11), expected)


def test_a_reset_row_starts_anew(model, golden, sequence):
    run = sequence(model, row=0)
    first = run.prefill(golden["len70/input_ids"], CHUNK)[-1]
    run.state, run.position = model.reset(run.state, 0), 0
    np.testing.assert_array_equal(run.prefill(golden["len70/input_ids"], CHUNK)[-1], first)


def test_sampled_tokens_depend_on_seed_and_position_only(model, golden):
    prompt, rows = golden["len7/input_ids"], model.info.max_rows
    state = model.init_state()
    for row in (0, 3):
        state = model.prefill(state, row, prompt, 0).state
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=7)
    other = SamplingParams(temperature=1.0, seed=8)
    sampling = Sampling.of([params, other, other, params] + [SamplingParams()] * (rows - 4))
    active, tokens = np.isin(np.arange(rows), [0, 3]), np.full(rows, 4)
    drawn = []
    for step in range(12):
        out = model.decode(state, tokens, np.full(rows, 7 + step), active, sampling)
        state, tokens = out.state, np.maximum(np.asarray(out.tokens), 0)
        assert tokens[0] == tokens[3]
        drawn.append(tokens[0])
    assert len(set(drawn)) > 4


@pytest.mark.slow
def test_stacked_layers_give_the_unrolled_result(model, compiled_for_bits, golden):
    unrolled = compiled_for_bits(1, stack_layers=False)
    a, b = (
        m.prefill(m.init_state(), 0, golden["len70/input_ids"][:16], 0).logits
        for m in (model, unrolled)
    )
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


def test_several_ranks_verify_as_they_decode(compiled_for_bits, golden, sequence, state_of_row):
    model = compiled_for_bits(8)
    one, many = sequence(model), sequence(model)
    tokens = golden["len7/fp32/greedy_tokens"]
    for run in (one, many):
        run.prefill(golden["len7/input_ids"])
    expected = [one.decode(token) for token in tokens[:5]]
    verified = many.verify(tokens[:8])
    many.commit(5)
    for t in range(5):
        np.testing.assert_array_equal(verified[t], expected[t])
    for name, part in state_of_row(many.state, 0, 12).items():
        np.testing.assert_array_equal(part, state_of_row(one.state, 0, 12)[name], err_msg=name)


def state_after_verify(model):
    return model.verify(model.init_state(), [0], [[1] * 8], [0]).state


WRONG_CALLS = {
    "a chunk holds 1..1024 tokens": lambda m: m.prefill(m.init_state(), 0, [], 0),
    "token id 512 lies outside 0..511": lambda m: m.prefill(m.init_state(), 0, [512], 0),
    "row 8 lies outside 0..7": lambda m: m.prefill(m.init_state(), 8, [1], 0),
    "do not fit a context of 256": lambda m: m.prefill(m.init_state(), 0, [1] * 10, 250),
    "tokens must have 8 entries": lambda m: m.decode(m.init_state(), [1], [0], [True]),
    "position 256 lies outside": lambda m: m.decode(m.init_state(), [1] * 8, [256] * 8, [True] * 8),
    "rows \\[0, 0\\] must be distinct": lambda m: m.verify(
        m.init_state(), [0, 0], [[1], [1]], [0, 0]
    ),
    "exceed 8 rows": lambda m: m.verify(m.init_state(), [0, 1], [[1] * 5] * 2, [0, 0]),
    "verify takes rows": lambda m: m.verify(m.init_state(), [0], [1, 2], [0]),
    "call commit first": lambda m: m.prefill(state_after_verify(m), 0, [1], 0),
    "call verify first": lambda m: m.commit(m.init_state(), [1]),
    "counts in 0..8": lambda m: m.commit(state_after_verify(m), [9]),
    "length 257 lies outside": lambda m: m.snapshot(m.init_state(), 0, 257),
}


@pytest.mark.parametrize("message", WRONG_CALLS)
def test_a_wrong_call_says_what_is_wrong(model, message):
    with pytest.raises(ValueError, match=message):
        WRONG_CALLS[message](model)


def test_decoding_reuses_the_state_buffers(model):
    state = model.init_state()
    before = state.caches.keys.unsafe_buffer_pointer()
    rows = model.info.max_rows
    state = model.decode(state, [1] * rows, [0] * rows, [True] * rows).state
    jax.block_until_ready(state.caches.keys)
    assert state.caches.keys.unsafe_buffer_pointer() == before


def consumed(model):
    state = model.init_state()
    model.prefill(state, 0, [1], 0)
    return state


WRONG_VALUES = {
    "tokens must hold integers": lambda m: m.prefill(m.init_state(), 0, [1.7], 0),
    "beyond 32 bits": lambda m: m.prefill(m.init_state(), 0, [2**40], 0),
    "lists of equal length": lambda m: m.verify(m.init_state(), [0, 1], [[1, 2], [3]], [0, 0]),
    "row 1.5 lies outside": lambda m: m.reset(m.init_state(), 1.5),
    "position -1 lies outside": lambda m: m.verify(m.init_state(), [0], [[1, 2]], [-1]),
    "it must hold 8, one per row": lambda m: m.decode(
        m.init_state(), [1] * 8, [0] * 8, [True] * 8, Sampling.greedy(2)
    ),
    "consumed by an earlier call": lambda m: m.prefill(consumed(m), 0, [2], 1),
    "restore takes what snapshot returned": lambda m: m.restore(m.init_state(), 0, None),
}


@pytest.mark.parametrize("message", WRONG_VALUES)
def test_a_wrong_value_says_what_is_wrong(model, message):
    with pytest.raises(ValueError, match=message):
        WRONG_VALUES[message](model)


def test_a_state_of_another_model_is_refused(model, load_tiny):
    other = load_tiny(1, max_rows=2)
    with pytest.raises(ValueError, match=r"ranks, rows and slots \(1, 2, 256\)"):
        model.prefill(other.init_state(), 0, [1], 0)
