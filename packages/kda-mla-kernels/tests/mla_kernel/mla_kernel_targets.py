"""The stage and the commit at real sizes, for compiling only: ``build(topology)`` each."""

import re
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding
from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.mla import MlaShape
from kda_mla_kernels.mla.kernel import MlaInputs, MlaMemory, Split, commit_latents, default_tile
from kda_mla_kernels.numerics import BF16
from mla_kernel_harness import Net, layers_call
from vmem_pool.aot.target import topology_of

SHAPE = MlaShape(key_dim=128, shared_dim=64, latent=512)
"""Of Kimi K3: 96 heads, 3 on a rank of 32."""
LAYERS, ROWS, SLOTS = 3, 16, 32768


def _arrays(topology, block):
    here = SingleDeviceSharding(topology.devices[0])

    def array(*size, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(size, dtype, sharding=here)

    rows = (LAYERS, ROWS)
    memory = MlaMemory(array(*rows, SLOTS, 512), array(*rows, 64, SLOTS))
    integers = array(block.sequences, dtype=jnp.int32)
    return array, memory, Where(integers, integers), integers


def stage(topology, heads, block, tile=None, split=None):
    array, memory, where, _ = _arrays(topology, block)
    params = pltpu.CompilerParams(disable_bounds_checks=True, disable_semaphore_checks=True)
    tile = tile or default_tile(SHAPE, jnp.bfloat16, SLOTS)
    sizes = dict(slots=SLOTS, tile=tile, split=split, layers=LAYERS, rows=ROWS)
    net = Net(SHAPE, heads, BF16, **sizes)
    rows = (LAYERS, block.padded)
    queries = [array(*rows, heads, width) for width in (512, 64)]
    inputs = MlaInputs(*queries, *(array(*rows, width) for width in (512, 64)))
    call = layers_call(net.stage(block), LAYERS, compiler_params=params)
    return jax.jit(call), (where, memory, inputs)


def commit(topology, block, split=None):
    array, memory, where, accepted = _arrays(topology, block)
    net = Net(SHAPE, 3, BF16, slots=SLOTS, split=split)
    records = array(LAYERS, block.padded, 576)
    run = partial(commit_latents, net.commits(block))
    return jax.jit(run, donate_argnums=0), (memory, records, where, accepted)


BLOCKS = ((1, 1), (8, 1), (1, 8), (16, 1), (2, 8))
SPLIT = Split(block=128, ranks=32)


def _targets():
    """``stage_3_8_1``: the stage with 3 heads for 8 sequences of 1 token, and so on."""
    for s, t in BLOCKS:
        for heads, split in ((3, None), (16, None), (96, SPLIT)):

            def build(topology, heads=heads, size=(s, t), split=split):
                return stage(topology, heads, Block(*size), split=split)

            yield f"stage_{heads}_{s}_{t}", build
        for name, split in (("commit", None), ("commit_split", SPLIT)):

            def build_commit(topology, size=(s, t), split=split):
                return commit(topology, Block(*size), split=split)

            yield f"{name}_{s}_{t}", build_commit


globals().update(_targets())


def stage_short_tile(topology):
    """16 heads in tiles of 512."""
    return stage(topology, 16, Block(1, 1), tile=512)


def print_copies(name):
    """Prints the shapes that the compiled program copies, outside of its kernels."""
    function, arguments = globals()[name](topology_of("tpu7x:2x2x1"))
    text = function.lower(*arguments).compile().as_text()
    print("copied:", *re.findall(r"= \(?(\w+\[[\d,]*\])[^=\n]*\bcopy(?:-start)?\(", text))
