"""The call around a kernel that streams its weights, for compiling only."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding
from vmem_pool.stream import StreamPlan, ring_scratch


@dataclass(frozen=True)
class StreamedCall:
    """A kernel of (x_ref, image_hbm, out_ref, *scratch, ring) on one device of a topology."""

    name: str
    plan: StreamPlan
    x: jax.ShapeDtypeStruct
    out: jax.ShapeDtypeStruct
    scratch: tuple[Any, ...]

    def build(self, kernel, topology, **compiler_params):
        """The jitted call and its arguments, as a target of a report."""
        call = pl.pallas_call(
            kernel,
            name=self.name,
            out_shape=self.out,
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pltpu.HBM)],
            scratch_shapes=[*self.scratch, ring_scratch(self.plan)],
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=60 << 20, **compiler_params),
        )
        here = SingleDeviceSharding(topology.devices[0])
        x = jax.ShapeDtypeStruct(self.x.shape, self.x.dtype, sharding=here)
        stored = jax.ShapeDtypeStruct(self.plan.image_shape, jnp.uint8, sharding=here)
        return jax.jit(call), (x, stored)
