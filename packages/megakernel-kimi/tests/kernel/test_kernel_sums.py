"""Sums of experts over the ranks of two hosts: equal bits, whichever way and beside whomever."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.block import Block
from megakernel_kimi.kernel.sums import Apart, ExpertSums, Together
from tpu_collectives import AllReduce, Barrier, Topology
from tpu_collectives.program import RankProgram

TWO_HOSTS = Topology.virtual(8, cores_per_chip=1, chips_per_host=4)
LANES, LATENT, COLUMNS = 4, 512, 128
HIDDEN = LANES * COLUMNS
ROWS = 3


def together(block):
    return Together(ExpertSums(TWO_HOSTS, block, LATENT, COLUMNS, jnp.bfloat16))


def apart(block, schedule):
    routed = AllReduce(TWO_HOSTS, block.rows, LATENT, schedule=schedule)
    return Apart(routed, ExpertSums(TWO_HOSTS, block, 0, COLUMNS, jnp.bfloat16))


def summed(sums, block, routed, shared):
    """[ranks, rows, ...] of the routed and of the shared experts, from equal shapes of parts."""

    def kernel(routed, shared, routed_out, shared_out, scratch):
        barrier = Barrier(TWO_HOSTS)
        barrier.signal()
        barrier.wait()
        started = sums.start(scratch, shared, jnp.int32(0))
        total, columns = sums.finish(sums.advance(started), routed[...])
        routed_out[...], shared_out[...] = total, columns

    widths = LATENT, COLUMNS
    outputs = [jax.ShapeDtypeStruct((block.padded, width), jnp.float32) for width in widths]
    program = RankProgram(kernel, TWO_HOSTS, outputs, [sums.scratch()])
    padded = [np.pad(x, ((0, 0), (0, block.padded - block.rows), (0, 0))) for x in (routed, shared)]
    return [out[:, : block.rows] for out in program.interpret(*padded).check()]


@pytest.fixture(scope="module")
def parts():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((8, ROWS, width), np.float32) for width in (LATENT, HIDDEN)]


@pytest.fixture(scope="module")
def by_row(parts):
    """Each row summed alone, both sums together."""
    block = Block(1, 1)
    rows = [
        summed(together(block), block, *(x[:, row : row + 1] for x in parts)) for row in range(ROWS)
    ]
    return [np.concatenate(sums, axis=1) for sums in zip(*rows)]


def test_a_row_alone_gets_the_sums_of_all_ranks(parts, by_row):
    routed, shared = (x.sum(axis=0) for x in parts)
    for rank in range(8):
        lane = rank % LANES
        np.testing.assert_allclose(by_row[0][rank], routed, atol=0.1)
        mine = shared[:, lane * COLUMNS : (lane + 1) * COLUMNS]
        np.testing.assert_allclose(by_row[1][rank], mine, atol=0.1)


@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_several_rows_get_the_bits_of_each_alone_however_the_sum_travels(parts, by_row, schedule):
    block = Block(ROWS, 1)
    found = summed(apart(block, schedule), block, *parts)
    for ours, alone in zip(found, by_row):
        np.testing.assert_array_equal(ours, alone)
