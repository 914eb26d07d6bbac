"""The stage at real sizes, for compiling only: ``build(topology)`` each."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding
from kda_mla_kernels.block import Block
from kda_mla_kernels.moe import RouterRule
from kda_mla_kernels.moe.kernel import ExpertShape, RoutedExperts
from kda_mla_kernels.numerics import BF16
from moe_kernel_harness import activation, layers_call

LATENT, EXPERTS, INNER, TOP_K, LAYERS = 3584, 896, 3072, 16, 3
"""Of Kimi K3; layers to give the loop something to do."""


def stage(topology, split, rows, form="mxfp4", chunk=16):
    here = SingleDeviceSharding(topology.devices[0])
    shape = ExpertShape(LATENT, INNER // split, EXPERTS, form)
    experts = RoutedExperts(shape, RouterRule(TOP_K), Block(rows, 1), BF16, activation(BF16), chunk)
    params = pltpu.CompilerParams(
        vmem_limit_bytes=60 << 20, disable_bounds_checks=True, disable_semaphore_checks=True
    )

    def array(*size, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(size, dtype, sharding=here)

    images = jax.tree.map(
        lambda size: array(*size, dtype=jnp.uint8),
        shape.image_shapes(LAYERS, EXPERTS),
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    padded = experts.block.padded
    call = layers_call(experts, LAYERS, EXPERTS, compiler_params=params)
    return jax.jit(call), (
        array(1, dtype=jnp.int32),
        images,
        array(LAYERS, padded, EXPERTS),
        array(LAYERS, 1, EXPERTS),
        array(LAYERS, padded, LATENT, dtype=jnp.bfloat16),
    )


for rows in (1, 4, 8, 16):
    for form in ("mxfp4", "fp8"):
        for chunk in (4, 8, 16):
            globals()[f"rank_{rows}_{form}_{chunk}"] = partial(
                stage, split=32, rows=rows, form=form, chunk=chunk
            )
