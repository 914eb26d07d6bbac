"""Kernels with known answers, for compile-only reports."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P


def _loops(n_ref, x_ref, out_ref):
    def outer(i, carry):
        def inner(j, carry):
            rows = pl.ds(j * 8, 8)
            out_ref[rows] = out_ref[rows] * x_ref[rows] + 1.0
            return carry

        return jax.lax.fori_loop(0, 32, inner, carry)

    jax.lax.fori_loop(0, 8, outer, 0)
    jax.lax.fori_loop(0, n_ref[0], outer, 0)


def build_loops(topology, rows=256):
    """Two nested loops of known length, then one of unknown length around a known one."""
    here = SingleDeviceSharding(topology.devices[0])
    call = pl.pallas_call(
        _loops,
        name="loops",
        out_shape=jax.ShapeDtypeStruct((rows, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
    )
    return jax.jit(call), (
        jax.ShapeDtypeStruct((1,), jnp.int32, sharding=here),
        jax.ShapeDtypeStruct((rows, 128), jnp.float32, sharding=here),
    )


def build_too_big(topology):
    """More than the default limit of scoped VMEM."""
    return build_loops(topology, rows=131072)


def build_broken(topology):
    """Fails before anything is compiled."""
    raise ValueError("this target is broken on purpose")


def _neighbour(x_ref, out_ref, send_sem, recv_sem):
    right = (jax.lax.axis_index("tp") + 1) % 8
    copy = pltpu.make_async_remote_copy(x_ref, out_ref, send_sem, recv_sem, device_id={"tp": right})
    copy.start()
    copy.wait()


def _build_neighbour(topology, skip_device_barrier):
    mesh = Mesh(np.array(topology.devices[:8]), ("tp",))
    call = pl.pallas_call(
        _neighbour,
        name="neighbour",
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
        compiler_params=pltpu.CompilerParams(
            has_side_effects=True, skip_device_barrier=skip_device_barrier
        ),
    )
    mapped = jax.shard_map(call, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
    shards = NamedSharding(mesh, P("tp"))
    return jax.jit(mapped), (jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=shards),)


def build_with_barrier(topology):
    """Communicates without a barrier of its own, so that the compiler adds one."""
    return _build_neighbour(topology, skip_device_barrier=False)


def build_without_barrier(topology):
    """The same, with the compiler's barrier switched off."""
    return _build_neighbour(topology, skip_device_barrier=True)
