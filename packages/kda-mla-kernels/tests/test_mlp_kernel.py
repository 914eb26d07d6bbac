"""The feed-forward stage over streamed weights, whole and in the shares of ranks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels import mlp
from kda_mla_kernels.block import Block
from kda_mla_kernels.mlp.kernel import FeedForward
from kda_mla_kernels.numerics import BF16, F32
from tpu_collectives.testing import quick_options
from vmem_pool.stream import Matrix, Stream, image, plan_stream, ring_scratch

ROWS, HIDDEN, INNER = 3, 256, 1024


def run(stage, x, gate, up, down):
    """This rank's part of the sum, f32 [P, D]."""
    dtype, width = stage.numerics.activation, stage.width
    matrices = {
        "gate_up": np.concatenate([gate, up], axis=1),
        "down": down,
    }
    planned = [Matrix(name, matrix.shape, dtype) for name, matrix in matrices.items()]
    plan = plan_stream({"mlp": planned}, ["mlp"], slot_bytes=512 << 10, depth=4)
    packed = image(plan, lambda segment, name: matrices[name].astype(dtype))

    def kernel(x, stored, out, scratch, ring):
        stream = Stream(plan, ring, stored)
        stream.start()
        reader = stream.segment("mlp", 0)
        stage(scratch, reader, x, out)
        reader.done()

    spaces = [pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pltpu.HBM)]
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((stage.block.padded, HIDDEN), jnp.float32),
        in_specs=spaces,
        out_specs=spaces[0],
        scratch_shapes=[stage.scratch(), ring_scratch(plan)],
        interpret=pltpu.InterpretParams(),
    )
    assert width == gate.shape[1]
    return np.asarray(
        jax.jit(call, compiler_options=quick_options(same_bits=True))(x.astype(dtype), packed)
    )


def drawn(numerics):
    generator = np.random.default_rng(0)

    def normal(*shape, scale):
        wide = generator.normal(size=shape) * scale
        return np.asarray(numerics.round(jnp.asarray(wide, jnp.float32)).astype(jnp.float32))

    x = np.pad(normal(ROWS, HIDDEN, scale=1.0), [(0, 8 - ROWS), (0, 0)])
    weights = [normal(HIDDEN, INNER, scale=HIDDEN**-0.5) for _ in range(2)]
    return jnp.asarray(x), *weights, normal(INNER, HIDDEN, scale=INNER**-0.5)


def expected(numerics, activation, x, gate, up, down):
    parts = [numerics.round(numerics.dot(x, jnp.asarray(part))) for part in (gate, up)]
    return np.asarray(numerics.dot(activation(*parts), jnp.asarray(down)))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_parts_of_all_ranks_sum_to_the_reference(ranks):
    x, gate, up, down = drawn(F32)
    stage = FeedForward(INNER // ranks, Block(ROWS, 1), F32)
    total = np.zeros((8, HIDDEN), np.float32)
    for rank in range(ranks):
        mine = slice(rank * stage.width, (rank + 1) * stage.width)
        total += run(stage, x, gate[:, mine], up[:, mine], down[mine])
    reference = expected(F32, partial(mlp.swiglu, numerics=F32), x, gate, up, down)
    np.testing.assert_allclose(total, reference, atol=2e-5)


def test_bf16_rounds_where_the_reference_does_with_another_activation_too():
    x, gate, up, down = drawn(BF16)
    situ = partial(mlp.situ, beta=4.0, linear_beta=25.0, numerics=BF16)
    stage = FeedForward(INNER, Block(ROWS, 1), BF16, situ, group=1)
    reference = expected(BF16, situ, x, gate, up, down)
    np.testing.assert_allclose(run(stage, x, gate, up, down), reference, atol=5e-3)
