"""Cached positions that are dealt out to ranks: what they find together is what one rank finds."""

import numpy as np
import pytest
from kda_mla_kernels.testing import Sequence

RANKS, CONTEXT = 2, 512
PROMPT, BLOCK = 250, 5
"""Tokens: those of the block stand on both sides of 256, where the first rank begins anew."""


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(7).integers(0, 500, PROMPT + BLOCK + 1)


@pytest.fixture(scope="module")
def load(load_tiny):
    def load(holders):
        return load_tiny(RANKS, short=True, rough=True, max_context=CONTEXT, holders=holders)

    return load


@pytest.fixture(scope="module")
def whole(load, tokens):
    """All tokens in ranks that hold every position."""
    run = Sequence(load(1), row=1)
    return run.prefill(tokens, all_logits=True)[0], run.state.caches


@pytest.fixture(scope="module")
def dealt(load, tokens):
    """The prompt in chunks that fill no block, a decoded token, a verified block kept in part, and
    a last token: the run, its logits by position, and a snapshot behind the prompt."""
    model = load(RANKS)
    run, logits = Sequence(model, row=1), {}
    for chunk in run.prefill(tokens[:PROMPT], 90, all_logits=True):
        logits |= dict(enumerate(chunk, start=len(logits)))
    saved = model.snapshot(run.state, 1, PROMPT)
    logits[PROMPT] = run.decode(tokens[PROMPT])
    block = tokens[PROMPT + 1 : PROMPT + 1 + BLOCK].copy()
    block[-1] = 300  # a rejected draft leaves no trace
    verified = run.verify(block)
    run.commit(BLOCK - 1)
    logits |= dict(enumerate(verified[:-1], start=PROMPT + 1))
    logits[PROMPT + BLOCK] = run.decode(tokens[-1])
    return run, np.stack([logits[position] for position in range(len(tokens))]), saved


def test_logits_are_those_of_ranks_that_hold_all_positions(whole, dealt):
    np.testing.assert_allclose(dealt[1], whole[0], rtol=0, atol=2e-4)


def test_every_position_is_held_by_one_rank(whole, dealt):
    ours, theirs = dealt[0].state.caches, whole[1]
    for rank, mine in enumerate(([*range(128), *range(256, 384)], [*range(128, 256)])):
        latents, shared = ours.latents[rank, :, 1], ours.shared[rank, :, 1]
        expected = theirs.latents[0, :, 1][:, mine]
        np.testing.assert_allclose(latents[:, : len(mine)], expected, rtol=0, atol=1e-4)
        expected = theirs.shared[0, :, 1][..., mine]
        np.testing.assert_allclose(shared[..., : len(mine)], expected, rtol=0, atol=1e-4)


def test_a_snapshot_restores_into_another_row_beside_another_sequence(dealt, tokens):
    run, logits, saved = dealt
    model = run.model
    assert ("cached positions", "dealt out to 2 ranks") in model.info.details
    assert saved.slots == 128
    state = model.prefill(model.init_state(), 3, tokens[:7], 0, all_logits=True).state
    state = model.restore(state, 6, saved)
    fed, positions = np.zeros(8, int), np.zeros(8, int)
    fed[[3, 6]], positions[[3, 6]] = [9, tokens[PROMPT]], [7, PROMPT]
    out = model.decode(state, fed, positions, positions > 0, with_logits=True)
    np.testing.assert_array_equal(np.asarray(out.logits)[6], logits[PROMPT])
