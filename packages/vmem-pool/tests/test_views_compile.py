"""Views compile for TPU v7, without one. Their values are checked in the interpreters only."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl, topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding
from vmem_pool import Buffer, plan, view

dtype = jnp.dtype(sys.argv[1])
planned = plan(
    [
        Buffer("before", (8, 128), jnp.float32, (0, 1)),
        Buffer("matrix", (20, 300), dtype, (0, 1)),
        Buffer("stack", (3, 64, 256), dtype, (1, 1), ((1, 1),)),
    ],
    1 << 22,
)

def kernel(matrix_ref, packed_hbm, matrix_out, stack_out, pool, sem):
    view(pool, planned, "before").store(jnp.zeros((8, 128), jnp.float32))
    matrix = view(pool, planned, "matrix")
    matrix.store(matrix_ref[...])
    slots = view(pool, planned, "stack")

    @pl.loop(0, 3)
    def _(slot):
        copy = pltpu.make_async_copy(packed_hbm, slots.window(slot), sem)
        copy.start()
        copy.wait()
        stack_out[slot] = slots.load(slot).astype(jnp.float32)

    matrix_out[...] = matrix.load()

target = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices[0]
here = SingleDeviceSharding(target)
shape = lambda dims, kind: jax.ShapeDtypeStruct(dims, kind, sharding=here)
rows = planned.by_name["stack"].bytes // 3 // 128
call = pl.pallas_call(
    kernel,
    out_shape=(
        jax.ShapeDtypeStruct((20, 300), dtype), jax.ShapeDtypeStruct((3, 64, 256), jnp.float32)
    ),
    in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)],
    scratch_shapes=[planned.scratch(), pltpu.SemaphoreType.DMA],
)
jax.jit(call).lower(shape((20, 300), dtype), shape((rows, 128), jnp.uint8)).compile()
"""


@pytest.mark.tpu_compile
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "uint8", "int4"])
def test_a_kernel_of_views_compiles(dtype):
    settings = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, dtype],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | settings,
    )
    assert done.returncode == 0, done.stderr[-3000:]
