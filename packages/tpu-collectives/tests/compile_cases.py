"""Compiles collectives for slices that are not there; run by test_compile.py in its own process."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from tpu_collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    ArgMax,
    Barrier,
    Broadcast,
    PairExchange,
    ReduceScatter,
    Topology,
    TuningError,
)
from tpu_collectives.levels import default_tree, tree_levels
from tpu_collectives.testing import RankProgram, repeated
from tpu_collectives.tune import looped, tune

USES = 2


def compile_repeated(collective):
    """Compile a loop over uses of a collective, as a TPU would run it."""
    taken = collective.input
    stacked = jax.ShapeDtypeStruct((USES, *taken.shape), taken.dtype)
    assert repeated(collective, USES).compile(stacked).as_text()


def all_reduces(name, sizes, wires=("bfloat16", "float32")):
    """Every schedule of the default tree, for (rows, width) in sizes."""
    topology = Topology.from_name(name)
    levels = tree_levels(topology, default_tree(topology))
    for rows, width in sizes:
        for wire in wires:
            for schedule in range(len(levels) + 1):
                comm = AllReduce(topology, rows, width, jnp.dtype(wire), schedule=schedule)
                compile_repeated(comm)


def three_levels(name, rows, width):
    """Siblings, chips, hosts."""
    topology = Topology.from_name(name)
    compile_repeated(AllReduce(topology, rows, width, tree=("chip", "core", "lane")))


def blocks(name, rows):
    """Every collective that moves blocks, within the partitions that the slice has."""
    topology = Topology.from_name(name)
    tree = default_tree(topology)
    compile_repeated(AllGather(topology, rows, 128))
    compile_repeated(AllGather(topology, rows, 256, jnp.int32, within=tree))
    compile_repeated(ReduceScatter(topology, rows, 128 * topology.ranks, tree=tree))
    compile_repeated(AllToAll(topology, rows, 200))
    compile_repeated(AllToAll(topology, rows, 128, jnp.float32, within="host"))
    compile_repeated(Broadcast(topology, rows, 100, jnp.int32, root=topology.ranks - 1))
    if topology.cores_per_chip == 2:
        compile_repeated(PairExchange(topology, rows, 512, jnp.float32))


def arg_max(name, rows):
    """Arg-max over the default tree, its pairs computed in the kernel."""
    topology = Topology.from_name(name)
    collective = ArgMax(topology, rows, 1 << 18, default_tree(topology))
    barrier = Barrier(topology)

    def kernel(scores_ref, best_ref, at_ref, refs):
        barrier.signal()
        scores = scores_ref[...]
        best = jnp.max(scores, axis=1, keepdims=True)
        at = jnp.argmax(scores, axis=1)[:, None].astype(jnp.int32)
        barrier.wait()
        handle = collective.start(refs, best, at, 0)
        best_ref[...], at_ref[...] = collective.finish(handle)

    outputs = [jax.ShapeDtypeStruct((rows, 1), dtype) for dtype in (jnp.float32, jnp.int32)]
    program = RankProgram(kernel, topology, outputs, (collective.scratch(),))
    assert program.compile(jax.ShapeDtypeStruct((rows, 1024), jnp.float32)).as_text()


def streamed(name, rows, hidden, layers):
    """Layers that load weights while their sums travel, with the checks of a release build off."""
    topology = Topology.from_name(name)
    comm, barrier = AllReduce(topology, rows, hidden), Barrier(topology)
    columns = hidden // 8

    def kernel(x_ref, weights_hbm, out_ref, ring, load_sems, refs):
        def load(layer):
            slot = jax.lax.rem(layer, 2)
            return pltpu.make_async_copy(weights_hbm.at[layer], ring.at[slot], load_sems.at[slot])

        barrier.signal()
        load(0).start()
        load(1).start()
        barrier.wait()
        out_ref[...] = x_ref[...]

        @pl.loop(0, layers)
        def _(layer):
            load(layer).wait()
            mine = out_ref[:, :columns].astype(jnp.bfloat16)
            weights = ring[jax.lax.rem(layer, 2)]
            partial = jnp.dot(mine, weights, preferred_element_type=jnp.float32)
            handle = comm.start(refs, partial, layer)

            @pl.when(layer + 2 < layers)
            def _():
                load(layer + 2).start()

            out_ref[...] = comm.finish(handle)

    scratch = [
        pltpu.VMEM((2, columns, hidden), jnp.bfloat16),
        pltpu.SemaphoreType.DMA((2,)),
        comm.scratch(),
    ]
    options = {
        "in_specs": [pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pl.ANY)],
        "compiler_params": barrier.compiler_params(0, checks=False, vmem_limit_bytes=60 << 20),
    }
    program = RankProgram(kernel, topology, (comm.output,), scratch, options)
    weights = jax.ShapeDtypeStruct((layers, columns, hidden), jnp.bfloat16)
    assert program.compile(comm.input, weights).as_text()


def everything(name, sizes):
    """All of the above, at the first size also with f32."""
    all_reduces(name, sizes, ["bfloat16"])
    all_reduces(name, sizes[:1], ["float32"])
    three_levels(name, *sizes[0])
    blocks(name, 1)
    arg_max(name, 8)
    streamed(name, *sizes[0], layers=6)


def tuning(name):
    """What is timed compiles, but nothing can be timed on devices that are not there."""
    topology = Topology.from_name(name)
    comm = AllReduce(topology, 8, 4096)
    assert looped(comm, 1000).compile(comm.input).as_text()
    with pytest.raises(TuningError, match="compile-only"):
        tune(topology, [(8, 4096)])
