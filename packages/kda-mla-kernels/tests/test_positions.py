"""Writing into caches that hold all positions or a rank's share, against a loop over positions."""

import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.attention.split import Split
from kda_mla_kernels.backend import Batch, HeldPositions, write_positions

BLOCK, LAYERS, ROWS, WIDTH = 128, 2, 3, 2
LAYER, ROW = 1, 2


def holders_of(ranks):
    """What every rank holds; one rank alone holds all."""
    if ranks == 1:
        return [HeldPositions()]
    return [HeldPositions(Split(BLOCK, ranks), rank) for rank in range(ranks)]


def chunk(first, tokens, live, alone):
    """One sequence of row 2; tokens that are not live stand at the position of the last one."""
    positions = first + np.minimum(np.arange(tokens), live - 1)
    live = np.arange(tokens) < live
    fields = np.zeros((1, tokens), int), positions[None], live[None], np.array([ROW])
    return Batch(*map(jnp.asarray, fields), flat_rows=tokens, alone=alone)


def expected(cache, batch, fresh, ranks, rank):
    """The cache [layers, rows, slots, width] after the live tokens of a rank."""
    cache = cache.copy()
    for t, position in enumerate(np.asarray(batch.positions)[0]):
        block, inside = divmod(int(position), BLOCK)
        owner, slot = (
            (0, position) if ranks == 1 else (block % ranks, block // ranks * BLOCK + inside)
        )
        if batch.live[0, t] and owner == rank:
            cache[LAYER, ROW, slot] = fresh[0, t]
    return cache


@pytest.mark.parametrize("alone", [False, True], ids=["chunk", "tokens"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_live_tokens_go_to_the_slots_of_their_positions_and_nothing_else_changes(ranks, alone):
    slots = 2 * BLOCK * (1 if ranks > 1 else 4)
    most = slots * ranks
    rng = np.random.default_rng(ranks)
    cache = rng.standard_normal((LAYERS, ROWS, slots, WIDTH)).astype(np.float32)
    edge = BLOCK * ranks
    for first, tokens, live in [
        (0, 1, 1),
        (edge - 1, 16, 9),
        (BLOCK - 1, 130, 130),
        (BLOCK + 1, min(edge + 1, slots), min(edge, slots)),
        (most - 5, 16, 5),
        (max(most - slots, 0), slots, slots),
    ]:
        batch = chunk(first, tokens, live, alone)
        fresh = rng.standard_normal((1, tokens, WIDTH)).astype(np.float32)
        for rank, held in enumerate(holders_of(ranks)):
            wanted = expected(cache, batch, fresh, ranks, rank)
            rows = write_positions(jnp.asarray(cache), LAYER, batch, jnp.asarray(fresh), -2, held)
            np.testing.assert_array_equal(rows, wanted)
            turned = jnp.asarray(np.swapaxes(cache, -1, -2))
            columns = write_positions(turned, LAYER, batch, jnp.asarray(fresh), -1, held)
            np.testing.assert_array_equal(np.swapaxes(columns, -1, -2), wanted)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_position_has_one_slot_on_one_rank(ranks):
    positions = np.arange(5 * BLOCK * ranks)
    found = [np.asarray(held.slots(jnp.asarray(positions))) for held in holders_of(ranks)]
    assert (np.sum([slots >= 0 for slots in found], axis=0) == 1).all()
    for held, slots in zip(holders_of(ranks), found):
        mine = slots >= 0
        np.testing.assert_array_equal(slots[mine], np.arange(5 * BLOCK))
        np.testing.assert_array_equal(held.positions(slots[mine]), positions[mine])
        for position in (0, BLOCK - 1, BLOCK, BLOCK * ranks, 3 * BLOCK * ranks + 5):
            first = int(held.first_slot(jnp.int32(position)))
            assert first == np.sum(mine[:position])
