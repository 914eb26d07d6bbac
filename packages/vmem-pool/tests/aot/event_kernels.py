"""A kernel whose order of events depends on scalars, for traces and for the compiler."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

TILE = 8 * 128 * 4
LAYERS = 6
SHAPES = (
    jax.ShapeDtypeStruct((LAYERS,), jnp.int32),
    jax.ShapeDtypeStruct((2 * LAYERS, 8, 128), jnp.float32),
)


def _layers(kinds_ref, x_hbm, out_ref, buffers, sems):
    """Layers of kind 0 read one tile, those of kind 1 two; each starts the next one's first."""

    def copy(i, slot):
        return pltpu.make_async_copy(x_hbm.at[i], buffers.at[slot], sems.at[slot])

    def one(i):
        out_ref[...] = out_ref[...] * 2.0 + buffers[0]

    def two(i):
        copy(2 * i + 1, 1).start()
        out_ref[...] = out_ref[...] + buffers[0]
        copy(2 * i + 1, 1).wait()

        def add(_, total):
            return total * buffers[1]

        out_ref[...] = jax.lax.fori_loop(0, kinds_ref[i] + 2, add, out_ref[...])

    def layer(i, carry):
        copy(2 * i, 0).wait()
        jax.lax.cond(kinds_ref[i] == 1, two, one, i)
        pl.when(i + 1 < LAYERS)(lambda: copy(2 * (i + 1), 0).start())
        return carry

    copy(0, 0).start()
    out_ref[...] = jnp.zeros_like(out_ref)
    jax.lax.fori_loop(0, LAYERS, layer, 0)


def _call():
    return pl.pallas_call(
        _layers,
        name="layers",
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        scratch_shapes=[pltpu.VMEM((2, 8, 128), jnp.float32), pltpu.SemaphoreType.DMA((2,))],
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=60 << 20, disable_bounds_checks=True, disable_semaphore_checks=True
        ),
    )


def layers():
    """The call and its arguments."""
    return _call(), SHAPES


def build(topology):
    """For the compiler."""
    here = SingleDeviceSharding(topology.devices[0])
    shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here) for s in SHAPES]
    return jax.jit(_call()), tuple(shapes)


def _pairs(chosen_ref, x_hbm, out_ref, buffers, sems):
    """Loads two tiles on one semaphore for each chosen place, then waits for them in a loop."""

    def copies(i):
        return [
            pltpu.make_async_copy(x_hbm.at[2 * i + n], buffers.at[2 * i + n], sems.at[i])
            for n in range(2)
        ]

    def each_chosen(act):
        def turn(i, carry):
            pl.when(chosen_ref[i] == 1)(lambda: [act(copy) for copy in copies(i)] and None)
            return carry

        jax.lax.fori_loop(0, LAYERS, turn, 0)

    each_chosen(lambda copy: copy.start())
    each_chosen(lambda copy: copy.wait())
    out_ref[...] = jnp.sum(buffers[...], axis=0)


def pairs():
    """A call of a kernel whose adjacent waits the compiler makes one, and its arguments."""
    call = pl.pallas_call(
        _pairs,
        name="pairs",
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        scratch_shapes=[
            pltpu.VMEM((2 * LAYERS, 8, 128), jnp.float32),
            pltpu.SemaphoreType.DMA((LAYERS,)),
        ],
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=60 << 20, disable_bounds_checks=True, disable_semaphore_checks=True
        ),
    )
    return call, SHAPES


def build_pairs(topology):
    """For the compiler."""
    here = SingleDeviceSharding(topology.devices[0])
    call, shapes = pairs()
    placed = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here) for s in shapes]
    return jax.jit(call), tuple(placed)
