"""Exchanges that a kernel waits for, counted in its own trace."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from tpu_collectives import AllReduce, Barrier, Topology
from vmem_pool.aot import trace_events

from benchmarks.accounting.phases import exchanges_of

ROWS, WIDTH, LAYERS = 1, 1024, 3
SIBLING = (("ranks", 1),)


def trace(tree=("all",), schedule=0):
    """A barrier, then a loop with one all-reduce a turn, on eight ranks; traced on rank 0."""
    topology = Topology.virtual(8)
    reduce = AllReduce(topology, ROWS, WIDTH, tree=tree, schedule=schedule)
    barrier = Barrier(topology)

    def kernel(x, out, scratch):
        barrier.signal()
        out[...] = x[...]
        barrier.wait()

        def layer(number, carry):
            out[...] = reduce.finish(reduce.start(scratch, out[...], number))
            return carry

        jax.lax.fori_loop(0, LAYERS, layer, 0)

    call = pl.pallas_call(
        kernel,
        name="reduces",
        out_shape=jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
        scratch_shapes=[reduce.scratch()],
        compiler_params=barrier.compiler_params(0),
        interpret=pltpu.InterpretParams(),
    )
    mesh = jax.sharding.AbstractMesh((8,), ("ranks",))
    mapped = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    shape = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return reduce, trace_events(mapped, shape, kernel="reduces", axis_index={"ranks": 0})


def test_a_barrier_and_each_direct_all_reduce_are_one_phase():
    _, found = trace()
    barrier, *reduces = exchanges_of(found.events, SIBLING)
    assert len(reduces) == LAYERS
    assert (barrier.messages, barrier.message_bytes) == (7, 0)
    for phase in reduces:
        assert (phase.messages, phase.message_bytes, phase.sibling) == (7, 2 * WIDTH, False)


def test_reduce_scatter_and_all_gather_are_two_phases():
    _, found = trace(schedule=1)
    assert len(exchanges_of(found.events, SIBLING)) == 1 + 2 * LAYERS


def test_a_phase_with_the_sibling_alone_is_not_off_chip():
    _, found = trace(tree=("chip", "core"))
    _, *reduces = exchanges_of(found.events, SIBLING)
    assert [phase.sibling for phase in reduces] == [True, False] * LAYERS


@pytest.mark.parametrize("schedule", [0, 1])
def test_phases_take_the_time_of_the_cost_model(schedule):
    reduce, found = trace(schedule=schedule)
    _, *reduces = exchanges_of(found.events, SIBLING)
    assert sum(p.arrival for p in reduces) == pytest.approx(LAYERS * reduce.modelled_us)
