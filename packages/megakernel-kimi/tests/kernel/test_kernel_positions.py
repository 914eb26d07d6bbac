"""The kernel over cached positions that are dealt out to ranks."""

from dataclasses import replace

import jax
import numpy as np
import pytest

RANKS, CONTEXT, ROW = 2, 512, 1
FIRST, BLOCK, ACCEPTED = 254, 4, 3
"""Tokens of the block stand on both sides of 256, where the first rank begins anew."""
HELD = [*range(128), *range(256, 384)], [*range(128, 256), *range(384, 512)]
"""Positions of each rank's slots."""


def state_of(model, held):
    """Random latents in the slots of ranks that hold these positions."""
    state, rng = model.init_state(), np.random.default_rng(3)
    caches = state.caches
    layers, rows, _, latent = caches.latents.shape[1:]
    latents = rng.standard_normal((layers, rows, CONTEXT, latent), np.float32)
    shared = rng.standard_normal((layers, rows, caches.shared.shape[3], CONTEXT), np.float32)
    parts = {
        "latents": np.stack([latents[:, :, mine] for mine in held]),
        "shared": np.stack([shared[..., mine] for mine in held]),
    }
    placed = {
        name: jax.device_put(part, getattr(caches, name).sharding) for name, part in parts.items()
    }
    return replace(state, caches=replace(caches, **placed))


def run(model, held):
    """Logits of a block that is kept in part, and of one behind it; the caches in between."""
    tokens = np.random.default_rng(7).integers(0, 500, (2, 1, BLOCK))
    first = model.verify(state_of(model, held), [ROW], tokens[0], [FIRST])
    moved = model.commit(first.state, [ACCEPTED])
    kept = {name: np.asarray(getattr(moved.caches, name)) for name in ("latents", "shared")}
    second = model.verify(moved, [ROW], tokens[1], [FIRST + ACCEPTED])
    return np.concatenate([first.logits[0], second.logits[0]]), kept


@pytest.fixture(scope="module")
def runs(load_kernel):
    """Of ranks that hold all positions, and of ranks that hold a share."""
    whole, dealt = (
        load_kernel(RANKS, short=True, max_rows=BLOCK, max_context=CONTEXT, holders=holders)
        for holders in (1, RANKS)
    )
    return run(whole, [range(CONTEXT)] * RANKS), run(dealt, HELD)


def test_logits_are_those_of_ranks_that_hold_all_positions(runs):
    (whole, _), (dealt, _) = runs
    np.testing.assert_allclose(dealt, whole, rtol=0, atol=2e-4)


def test_each_accepted_token_is_written_by_the_rank_that_holds_it(runs):
    (_, whole), (_, dealt) = runs
    for rank, mine in enumerate(HELD):
        ours, expected = dealt["latents"][rank], whole["latents"][0][:, :, mine]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
        ours, expected = dealt["shared"][rank], whole["shared"][0][..., mine]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
