"""Embedding rows of a table that is cut over ranks, in the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels.block import Block
from kda_mla_kernels.embedding import EmbeddingRows


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_rank_gives_its_own_tokens_rows_and_zeros_for_the_others(dtype):
    first, rows, width = 100, 48, 256
    table = jnp.asarray(np.random.default_rng(0).normal(size=(rows, width)), dtype)
    tokens = np.array([100, 147, 116, 99, 148, 0], np.int32)
    stage = EmbeddingRows(Block(6, 1), rows, width, dtype)

    def kernel(tokens_smem, table_hbm, out_ref, scratch):
        stage.start(scratch, table_hbm, tokens_smem, jnp.int32(first))
        out_ref[...] = stage(scratch, table_hbm, tokens_smem, jnp.int32(first))

    found = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((6, width), jnp.float32),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        scratch_shapes=[stage.scratch()],
        interpret=pltpu.InterpretParams(),
    )(tokens, table)
    wide = np.asarray(table.astype(jnp.float32))
    expected = [wide[t - first] if first <= t < first + rows else np.zeros(width) for t in tokens]
    np.testing.assert_array_equal(np.asarray(found), np.stack(expected))


def test_a_table_that_is_not_in_whole_tiles_is_refused():
    with pytest.raises(ValueError, match="a multiple of 16 rows, not 50"):
        EmbeddingRows(Block(1, 1), 50, 128, jnp.float32)


def test_a_block_without_tokens_is_refused():
    with pytest.raises(ValueError, match="not 2 of 0"):
        Block(2, 0)
