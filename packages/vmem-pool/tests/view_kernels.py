"""One kernel of views per dtype, in one program, for compiling only."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding
from vmem_pool import Buffer, plan, view

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.uint8, jnp.int4)


def _call(dtype):
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

    call = pl.pallas_call(
        kernel,
        name=f"views_{jnp.dtype(dtype)}",
        out_shape=(
            jax.ShapeDtypeStruct((20, 300), dtype),
            jax.ShapeDtypeStruct((3, 64, 256), jnp.float32),
        ),
        in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[planned.scratch(), pltpu.SemaphoreType.DMA],
    )
    rows = planned.by_name["stack"].bytes // 3 // 128
    return call, ((20, 300), dtype), ((rows, 128), jnp.uint8)


def build(topology):
    """All kernels."""
    here = SingleDeviceSharding(topology.devices[0])
    calls, *operands = zip(*map(_call, DTYPES))

    def all_of_them(matrices, packed):
        return [call(*pair) for call, *pair in zip(calls, matrices, packed)]

    abstract = [
        [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in group]
        for group in operands
    ]
    return jax.jit(all_of_them), tuple(abstract)
