"""The best token of a vocabulary shard."""

import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.head import best_of_shard
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
