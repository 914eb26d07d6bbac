"""Latent attention: its forms against float64 numpy and against each other."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels import mla
from kda_mla_kernels.numerics import BF16, F32
from tpu_collectives.testing import quick_options

HEADS, KEY, SHARED, LATENT, VALUE = 3, 8, 4, 16, 6
SHAPE = mla.MlaShape(KEY, SHARED, LATENT)
BLOCK, SLOTS = 8, 48


def normal(*shape, seed):
    """Drawn by numpy: jax would compile a program for each shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.fixture(scope="module")
def case():
    """Two sequences of different length, three queries each; rows behind them hold junk."""
    q = normal(2, 3, HEADS, KEY + SHARED, seed=0)
    cache = normal(2, SLOTS, LATENT + SHARED, seed=1)
    up = mla.split_up(normal(HEADS * (KEY + VALUE), LATENT, seed=2), HEADS, KEY)
    positions = jnp.array([[0, 1, 2], [38, 39, 40]])
    return q, cache, up, positions


def numpy_attention(q, cache, up, positions):
    q, cache, keys, values = (np.asarray(x, np.float64) for x in (q, cache, up.keys, up.values))
    out = np.zeros((*q.shape[:3], VALUE))
    for s, t, h in np.ndindex(q.shape[:3]):
        seen = cache[s, : positions[s, t] + 1]
        key = np.concatenate([seen[:, :LATENT] @ keys[h].T, seen[:, LATENT:]], axis=1)
        scores = key @ q[s, t, h] / np.sqrt(KEY + SHARED)
        p = np.exp(scores - scores.max())
        out[s, t, h] = (p / p.sum()) @ (seen[:, :LATENT] @ values[h].T)
    return out


def blocked(share, q, cache, up, positions, numerics=F32):
    """One share's partial result; the share's rows are picked out of the whole cache."""

    def fetch(index):
        return jax.lax.dynamic_slice_in_dim(cache, share.start(index), share.block, axis=1)

    queries = mla.absorb(q, up, numerics)
    return mla.attend_blocked(queries, fetch, share, positions, SHAPE, numerics)


def in_shares(shares, q, cache, up, positions, numerics=F32):
    parts = [blocked(share, q, cache, up, positions, numerics) for share in shares]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *parts)
    return mla.finish(mla.merge(stacked), up, numerics)


def dealt(ranks):
    count = SLOTS // BLOCK // ranks
    return [mla.Share.interleaved(rank, ranks, BLOCK, count) for rank in range(ranks)]


def runs(ranks):
    count = SLOTS // BLOCK // ranks
    return [mla.Share(BLOCK, count, first=rank * count * BLOCK) for rank in range(ranks)]


FORMS = {
    "expanded": mla.expanded_attention,
    "absorbed": mla.absorbed_attention,
    "blocked": partial(in_shares, dealt(1)),
    "three interleaved shares": partial(in_shares, dealt(3)),
    "three shares in a run": partial(in_shares, runs(3)),
}


@cache
def program(form, numerics):
    return jax.jit(
        lambda *args: FORMS[form](*args, numerics=numerics),
        compiler_options=quick_options(same_bits=True) | {"xla_allow_excess_precision": False},
    )


def run(form, case, numerics=F32):
    return program(form, numerics)(*case)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_numpy(form, case):
    np.testing.assert_allclose(run(form, case), numpy_attention(*case), rtol=2e-6, atol=2e-6)


def test_forms_agree_in_bf16_within_a_few_roundings(case):
    """Expanded keys and values are rounded in one form, absorbed queries in the others."""
    q, cache, up, positions = case
    rounded = (*(x.astype(jnp.bfloat16) for x in (q, cache)), up, positions)
    exact = numpy_attention(*rounded[:2], jax.tree.map(BF16.round, up), positions)
    for form in ("expanded", "absorbed", "three interleaved shares"):
        ours = run(form, rounded, BF16)
        assert ours.dtype == jnp.bfloat16
        # Scores of a few units move by some 2^-8 of themselves, and shares with them.
        error = np.abs(np.asarray(ours, np.float64) - exact)
        assert error.max() < 0.03 * np.abs(exact).max()


def test_a_merge_of_shares_equals_one_piece(case):

    @jax.jit
    def both_ways(q, cache, up, positions):
        queries, slots = mla.absorb(q, up, F32), jnp.arange(SLOTS)
        whole = mla.attend(queries, cache, slots, positions, SHAPE, F32)
        # Any split will do: here by the position's remainder.
        parts = [
            mla.attend(queries, cache[:, r::3], slots[r::3], positions, SHAPE, F32)
            for r in range(3)
        ]
        return whole, mla.merge(jax.tree.map(lambda *xs: jnp.stack(xs), *parts))

    whole, merged = both_ways(*case)
    np.testing.assert_allclose(merged.top, whole.top, rtol=2e-6)
    np.testing.assert_allclose(merged.total, whole.total, rtol=1e-5)
    np.testing.assert_allclose(merged.latent, whole.latent, rtol=0, atol=2e-5)


def test_a_share_in_which_nothing_is_seen_weighs_nothing(case):
    q, cache, up, positions = case
    late = mla.Share(BLOCK, 1, first=40)
    part = blocked(late, q, cache, up, positions)
    # The first sequence ends at position 2, the second at 40: only its last query sees one row.
    np.testing.assert_array_equal(part.total[0], 0)
    np.testing.assert_array_equal(part.latent[0], 0)
    np.testing.assert_allclose(part.total[1], np.outer([0, 0, 1], np.ones(HEADS)), rtol=1e-6)
    assert np.isfinite(run("three shares in a run", case)).all()


def test_a_row_does_not_depend_on_longer_neighbours(case):
    q, cache, up, _ = case
    short = jnp.array([[5, 6, 7], [5, 6, 7]])
    for form in ("blocked", "three interleaved shares"):
        alone = run(form, (q, cache, up, short))
        beside = run(form, (q, cache, up, short.at[1].add(30)))
        np.testing.assert_array_equal(alone[0], beside[0])


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_later_positions_are_not_seen(form, case):
    q, cache, up, _ = case
    positions = jnp.array([[1, 2, 3], [1, 2, 3]])
    dirty = cache.at[:, 4:].set(1e4)
    np.testing.assert_array_equal(
        run(form, (q, cache, up, positions)), run(form, (q, dirty, up, positions))
    )


def test_the_shared_key_dims_are_seen_by_every_head(case):
    q, cache, up, positions = case
    changed = run("absorbed", (q, cache.at[:, 0, LATENT:].add(1.0), up, positions))
    moved = np.abs(changed - run("absorbed", case)).max(axis=(0, 1, 3))
    assert (moved > 1e-3).all()


def test_only_blocks_that_begin_at_or_before_the_position_are_read():
    share = mla.Share.interleaved(1, 4, block=8, count=5)
    counts = [int(share.blocks_up_to(jnp.int32(p))) for p in (0, 7, 8, 39, 40, 1000)]
    assert counts == [0, 0, 1, 1, 2, 5]
    assert [share.start(i) for i in range(3)] == [8, 40, 72]


@pytest.mark.parametrize(
    "sizes", [(0, 1, 0, None), (8, 0, 0, None), (8, 1, -1, None), (8, 1, 0, 7)]
)
def test_a_share_that_cannot_be_is_refused(sizes):
    with pytest.raises(ValueError, match=r"not block=|at least the block"):
        mla.Share(*sizes)
