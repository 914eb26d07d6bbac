"""The stage and the commit at real sizes, for compiling only: ``build(topology)`` each."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
from gdn_kernel_harness import Net, layers_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding
from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.gdn.kernel import DeltaNet, GdnMemory, GdnShape, GdnVectors, commit_states
from kda_mla_kernels.numerics import BF16
from vmem_pool.aot.target import topology_of

RANK = GdnShape(key_heads=2, value_heads=6, key_dim=128, value_dim=128, taps=4, tail_padding=1)
"""A rank of eight of the 27B model."""
CORE = GdnShape(key_heads=16, value_heads=48, key_dim=128, value_dim=128, taps=4, tail_padding=1)
"""All its heads on one core."""
LAYERS, ROWS = 3, 16


def _arrays(topology, shape, block):
    here = SingleDeviceSharding(topology.devices[0])

    def array(*size, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(size, dtype, sharding=here)

    heads = (shape.value_heads, shape.key_dim, shape.value_dim)
    memory = GdnMemory(
        tail=array(LAYERS, ROWS, shape.tail_rows, shape.channels, dtype=jnp.bfloat16),
        delta=array(LAYERS, ROWS, *heads),
    )
    integers = array(block.sequences, dtype=jnp.int32)
    return array, memory, Where(integers, integers), integers


class RuleAlone(DeltaNet):
    """Nothing but the delta rule, its loads and its record, for its cycles."""

    def __call__(self, scratch, memory, vectors, projected, gates, where, layer, records):
        self._run_sequences(scratch, memory, where, layer)
        self._send_record(scratch, records, layer).start()
        return scratch.outputs[...].astype(jnp.bfloat16)


def rule(topology, shape, block):
    return stage(topology, shape, block, RuleAlone)


def stage(topology, shape, block, kind=DeltaNet):
    array, memory, where, _ = _arrays(topology, shape, block)
    params = pltpu.CompilerParams(
        vmem_limit_bytes=60 << 20, disable_bounds_checks=True, disable_semaphore_checks=True
    )
    net = Net(shape, BF16, LAYERS, ROWS, kind=kind)
    call = layers_call(net.stage(block), LAYERS, compiler_params=params)
    heads = array(LAYERS, 1, shape.value_heads)
    vectors = GdnVectors(
        taps=array(LAYERS, shape.taps, shape.channels),
        a_log=heads,
        dt_bias=heads,
        norm=array(LAYERS, 1, shape.value_dim),
    )
    width = shape.channels + shape.value_width
    projected = array(LAYERS, block.padded, width, dtype=jnp.bfloat16)
    gates = array(LAYERS, block.padded, 2 * shape.value_heads)
    return jax.jit(call), (where, memory, vectors, projected, gates)


def commit(topology, shape, block):
    array, memory, where, accepted = _arrays(topology, shape, block)

    def run(memory, records, where, accepted):
        return commit_states(shape, block, jnp.bfloat16, memory, records, where, accepted)

    records = array(LAYERS, block.padded, shape.record_width)
    return jax.jit(run, donate_argnums=0), (memory, records, where, accepted)


def _targets():
    """``stage_rank_8_1``: the stage at a rank's size for 8 sequences of 1 token, and so on."""
    for kind in (stage, commit, rule):
        for name, shape in (("rank", RANK), ("core", CORE)):
            for s, t in ((1, 1), (8, 1), (16, 1), (2, 4), (1, 16)):

                def build(topology, kind=kind, shape=shape, size=(s, t)):
                    return kind(topology, shape, Block(*size))

                yield f"{kind.__name__}_{name}_{s}_{t}", build


globals().update(_targets())


def stage_short_tail(topology):
    """A tail of W-1 rows."""
    return stage(topology, replace(RANK, tail_padding=0), Block(8, 1))


def commit_short_tail(topology):
    """A tail of W-1 rows."""
    return commit(topology, replace(RANK, tail_padding=0), Block(8, 1))


def print_copies(build):
    """Prints the shapes that the compiled program copies, outside of its kernels."""
    function, arguments = globals()[build](topology_of("tpu7x:2x2x1"))
    text = function.lower(*arguments).compile().as_text()
    print("copied:", *re.findall(r"= \(?(\w+\[[\d,]*\])[^=\n]*\bcopy(?:-start)?\(", text))
