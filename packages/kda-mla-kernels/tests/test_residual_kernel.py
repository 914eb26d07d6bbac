"""The attention residual inside a kernel against its reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels import residual
from kda_mla_kernels.block import Block
from kda_mla_kernels.numerics import BF16, F32
from kda_mla_kernels.residual.kernel import Residual
from tpu_collectives.testing import quick_options

HIDDEN, EPS = 256, 1e-5
AS_ROUNDED = {"xla_allow_excess_precision": False}


def run(numerics, rows, updates, vectors, closing, same_bits=False):
    """The mixture after each update; a block is closed after those in ``closing``."""
    stage = Residual(Block(rows, 1), HIDDEN, len(closing), EPS, numerics)
    padded = stage.block.padded

    def kernel(updates, vectors, out, scratch):
        stage.reset(scratch)
        for at in range(len(updates)):
            finished = sum(block < at for block in closing)
            stage.prepare(scratch, jnp.int32(finished), vectors[at])
            stage.add(scratch, updates[at])
            out[at] = stage.mix(scratch, vectors[at])
            if at in closing:
                stage.close_block(scratch, jnp.int32(finished))

    shape = jax.ShapeDtypeStruct((len(updates), padded, HIDDEN), numerics.activation)
    call = pl.pallas_call(
        kernel,
        out_shape=shape,
        scratch_shapes=[stage.scratch()],
        interpret=pltpu.InterpretParams(),
    )
    padding = [(0, 0), (0, padded - rows), (0, 0)]
    quick = jax.jit(call, compiler_options=AS_ROUNDED | quick_options(same_bits=same_bits))
    return quick(jnp.pad(updates, padding), vectors[:, None])[:, :rows]


@partial(
    jax.jit,
    static_argnames=("numerics", "closing"),
    compiler_options=AS_ROUNDED | quick_options(),
)
def expected(numerics, updates, vectors, closing):
    blocks, prefix, found = [], jnp.zeros_like(updates[0]), []
    for at, update in enumerate(updates):
        wide = prefix.astype(jnp.float32) + update.astype(jnp.float32)
        prefix = numerics.round(wide)
        stacked = jnp.stack(blocks) if blocks else jnp.zeros((0, *prefix.shape), prefix.dtype)
        found.append(residual.mix(stacked, prefix, vectors[at], EPS, numerics))
        if at in closing:
            blocks.append(prefix)
            prefix = jnp.zeros_like(prefix)
    return jnp.stack(found)


@pytest.mark.parametrize(("numerics", "tolerance"), [(F32, 2e-6), (BF16, 0.02)])
@pytest.mark.parametrize("rows", [1, 9])
def test_mixtures_equal_the_reference(numerics, tolerance, rows):
    generator = np.random.default_rng(rows)
    drawn = generator.normal(size=(5, rows, HIDDEN)).astype(np.float32)
    updates = numerics.round(jnp.asarray(drawn))
    vectors = jnp.asarray(generator.normal(size=(5, HIDDEN)) / 8, jnp.float32)
    ours = run(numerics, rows, updates, vectors, (0, 2))
    reference = expected(numerics, updates, vectors, (0, 2))
    wide = (np.asarray(x.astype(jnp.float32)) for x in (ours, reference))
    np.testing.assert_allclose(*wide, atol=tolerance)


def test_a_row_has_the_same_bits_alone_and_beside_others():
    generator = np.random.default_rng(3)
    updates = BF16.round(jnp.asarray(generator.normal(size=(4, 12, HIDDEN)), jnp.float32))
    vectors = jnp.asarray(generator.normal(size=(4, HIDDEN)) / 8, jnp.float32)
    together = run(BF16, 12, updates, vectors, (1,), same_bits=True)[:, 10:11]
    alone = run(BF16, 1, updates[:, 10:11], vectors, (1,), same_bits=True)
    np.testing.assert_array_equal(*(np.asarray(x.astype(jnp.float32)) for x in (together, alone)))
