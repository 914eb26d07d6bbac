"""The stage and the commit at real sizes, for compiling only: ``build(topology)`` each."""

import re

import jax
import jax.numpy as jnp
from gqa_kernel_harness import Net, layers_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding
from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.gqa.kernel import (
    GqaMemory,
    GqaShape,
    GqaVectors,
    commit_keys,
    default_tile,
)
from kda_mla_kernels.numerics import BF16
from vmem_pool.aot.target import topology_of

RANK = GqaShape(query_heads=3, kv_heads=1, head_dim=256, rotary_dim=64, theta=1e7)
"""A rank of eight of the 27B model."""
CORE = GqaShape(query_heads=24, kv_heads=4, head_dim=256, rotary_dim=64, theta=1e7)
"""All its heads on one core."""
LAYERS, ROWS, SLOTS = 3, 16, 32768


def _arrays(topology, shape, block):
    here = SingleDeviceSharding(topology.devices[0])

    def array(*size, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(size, dtype, sharding=here)

    heads = (LAYERS, ROWS, shape.kv_heads)
    memory = GqaMemory(array(*heads, shape.head_dim, SLOTS), array(*heads, SLOTS, shape.head_dim))
    integers = array(block.sequences, dtype=jnp.int32)
    return array, memory, Where(integers, integers), integers


def stage(topology, shape, block, tile=None):
    array, memory, where, _ = _arrays(topology, shape, block)
    params = pltpu.CompilerParams(disable_bounds_checks=True, disable_semaphore_checks=True)
    tile = tile or default_tile(shape, jnp.bfloat16, SLOTS)
    net = Net(shape, BF16, slots=SLOTS, tile=tile, layers=LAYERS, rows=ROWS)
    gain = array(LAYERS, 1, shape.head_dim, dtype=jnp.float32)
    projected = array(LAYERS, block.padded, shape.projected_width)
    call = layers_call(net.stage(block), LAYERS, compiler_params=params)
    return jax.jit(call), (where, memory, GqaVectors(gain, gain), projected)


def commit(topology, shape, block):
    array, memory, where, accepted = _arrays(topology, shape, block)

    def run(memory, records, where, accepted):
        return commit_keys(shape, block, jnp.bfloat16, memory, records, where, accepted)

    records = array(LAYERS, block.padded, shape.record_width)
    return jax.jit(run, donate_argnums=0), (memory, records, where, accepted)


def _targets():
    """``stage_rank_8_1``: the stage at a rank's size for 8 sequences of 1 token, and so on."""
    for kind in (stage, commit):
        for name, shape in (("rank", RANK), ("core", CORE)):
            for s, t in ((1, 1), (8, 1), (16, 1), (2, 8), (1, 16)):

                def build(topology, kind=kind, shape=shape, size=(s, t)):
                    return kind(topology, shape, Block(*size))

                yield f"{kind.__name__}_{name}_{s}_{t}", build


globals().update(_targets())


def stage_core_long_tile(topology):
    """A whole block of 2,048 keys in one tile."""
    return stage(topology, CORE, Block(1, 1), tile=2048)


def print_copies(name):
    """Prints the shapes that the compiled program copies, outside of its kernels."""
    function, arguments = globals()[name](topology_of("tpu7x:2x2x1"))
    text = function.lower(*arguments).compile().as_text()
    print("copied:", *re.findall(r"= \(?(\w+\[[\d,]*\])[^=\n]*\bcopy(?:-start)?\(", text))
