"""The best tokens of a vocabulary shard."""

import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.head import best_of_shard, candidates_of_shard
from kda_mla_kernels.head.kernel import CHUNK


def best(logits, count, first=0):
    value, ids = best_of_shard(jnp.asarray(logits, jnp.float32), jnp.int32(first), jnp.int32(count))
    return np.asarray(value)[:, 0], np.asarray(ids)[:, 0]


@pytest.mark.parametrize("columns", [128, CHUNK, 2 * CHUNK + 256])
def test_value_and_id_are_those_of_numpy(columns):
    logits = np.random.default_rng(0).normal(size=(8, columns)).astype(np.float32)
    count = columns - 20
    value, ids = best(logits, count, first=1000)
    np.testing.assert_array_equal(value, logits[:, :count].max(axis=1))
    np.testing.assert_array_equal(ids, 1000 + logits[:, :count].argmax(axis=1))


def test_of_equal_logits_the_lowest_id_wins_across_chunks_too():
    logits = np.zeros((2, 2 * CHUNK))
    logits[0, [7, 9, CHUNK + 3]] = 5.0
    logits[1, [CHUNK + 3, CHUNK + 4]] = 5.0
    assert best(logits, 2 * CHUNK)[1].tolist() == [7, CHUNK + 3]


def test_padding_and_nan_never_win():
    logits = np.full((2, 256), -3.0)
    logits[:, 100:] = 9.0  # padding
    logits[0, 4] = np.nan
    logits[:, 50] = -1.0
    value, ids = best(logits, 100)
    assert value.tolist() == [-1.0, -1.0]
    assert ids.tolist() == [50, 50]


@pytest.mark.parametrize("count", [0, 128])
def test_a_shard_without_a_candidate_has_minus_infinity(count):
    value, ids = best(np.full((1, 128), np.nan), count, first=640)
    assert value.tolist() == [-np.inf]
    assert ids.tolist() == [640]


def candidates(logits, count, wanted, first=0):
    found = candidates_of_shard(jnp.asarray(logits, jnp.float32), first, jnp.int32(count), wanted)
    return np.asarray(found.values), np.asarray(found.ids)


@pytest.mark.parametrize("wanted", [1, 5, 128])
def test_candidates_are_the_largest_logits_in_order(wanted):
    # Whole numbers, so that many are equal, on both sides of a chunk's end.
    logits = np.random.default_rng(1).integers(-9, 9, (8, CHUNK + 256)).astype(np.float32)
    logits[2, 5], logits[3, CHUNK + 1] = np.inf, np.inf
    count = CHUNK + 200
    values, ids = candidates(logits, count, wanted, first=700)
    order = np.argsort(-logits[:, :count], axis=1, kind="stable")[:, :wanted]
    np.testing.assert_array_equal(ids[:, :wanted], 700 + order)
    np.testing.assert_array_equal(values[:, :wanted], np.take_along_axis(logits, order, axis=1))
    assert np.all(values[:, wanted:] == -np.inf)


def test_a_shard_with_too_few_candidates_ends_in_minus_infinity():
    logits = np.full((1, 256), 9.0)
    logits[0, :3] = [1.0, np.nan, 2.0]
    values, ids = candidates(logits, 3, 8)
    assert values[0, :3].tolist() == [2.0, 1.0, -np.inf]
    assert ids[0, :2].tolist() == [2, 0]
    assert np.all(values[0, 2:] == -np.inf)


@pytest.mark.parametrize("wanted", [0, 129])
def test_as_many_candidates_as_a_register_has_lanes(wanted):
    with pytest.raises(ValueError, match=f"{wanted} candidates"):
        candidates(np.zeros((1, 128)), 128, wanted)
