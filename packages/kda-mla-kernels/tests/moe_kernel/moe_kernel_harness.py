"""A kernel of nothing but routed experts, with random weights."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels import mlp, moe
from kda_mla_kernels.moe.kernel import ExpertImages
from kda_mla_kernels.quant import Mxfp4, decode
from tpu_collectives.testing import quick_options

SMEM, VMEM, HBM = (
    pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pltpu.HBM)
)
CAPS = {"beta": 4.0, "linear_beta": 25.0}


@cache
def activation(numerics):
    """Equal for equal numerics, so that stages are equal too."""
    return partial(mlp.situ, **CAPS, numerics=numerics)


@cache
def layers_call(stage, layers, model_experts, interpret=False, compiler_params=None):
    """``call(first, images, scores, bias, latent) -> (sums, weights)``, all layers.

    ``first`` is i32 [1], the first expert that is held here.
    """
    rows, latent = stage.block.padded, stage.shape.latent

    def kernel(first, images, scores, bias, latents, out, weights, scratch):
        @pl.loop(0, layers)
        def _(layer):
            found = stage.start(scratch, images, layer, scores[layer], bias[layer], first[0])
            weights[layer] = found
            out[layer] = stage(scratch, images, layer, latents[layer])

    call = pl.pallas_call(
        kernel,
        name="moe_layers",
        out_shape=(
            jax.ShapeDtypeStruct((layers, rows, latent), jnp.float32),
            jax.ShapeDtypeStruct((layers, rows, model_experts), jnp.float32),
        ),
        in_specs=[SMEM, ExpertImages(HBM, HBM, HBM), VMEM, VMEM, VMEM],
        out_specs=(VMEM, VMEM),
        scratch_shapes=[stage.scratch()],
        interpret=interpret,
        compiler_params=compiler_params,
    )
    return jax.jit(call, compiler_options=quick_options()) if interpret else call


class Experts:
    """Random experts in the checkpoint's form, and what the reference makes of them."""

    def __init__(self, layers, experts, latent, channels, seed=0):
        self.generator = np.random.default_rng(seed)
        lead = (layers, experts)
        self.gate = self._draw(*lead, channels, latent)
        self.up = self._draw(*lead, channels, latent)
        self.down = self._draw(*lead, latent, channels)

    def _draw(self, *shape):
        *lead, outputs, inputs = shape
        packed = self.generator.integers(0, 256, (*lead, outputs, inputs // 2), np.uint8)
        scales = self.generator.integers(121, 126, (*lead, outputs, inputs // 32), np.uint8)
        return Mxfp4(packed, scales)

    def images(self, shape, ranks=1, rank=0):
        """This rank's channels of all experts."""
        width = shape.channels
        mine = slice(rank * width, (rank + 1) * width)
        halves = slice(rank * width // 2, (rank + 1) * width // 2)
        groups = slice(rank * width // 32, (rank + 1) * width // 32)
        gate, up = (
            Mxfp4(m.packed[..., mine, :], m.scales[..., mine, :]) for m in (self.gate, self.up)
        )
        down = Mxfp4(self.down.packed[..., halves], self.down.scales[..., groups])
        return jax.tree.map(jnp.asarray, shape.pack(gate, up, down))

    def reference(self, layer, latent, scores, bias, rule, numerics):
        matrices = (
            jnp.asarray(decode(Mxfp4(m.packed[layer], m.scales[layer])))
            for m in (self.gate, self.up, self.down)
        )
        return _reference(moe.ExpertWeights(*matrices), latent, scores, bias, rule, numerics)


@partial(jax.jit, static_argnames=("rule", "numerics"))
def _reference(weights, latent, scores, bias, rule, numerics):
    routes = moe.choose(scores, bias, rule)
    total = moe.every_expert(latent, weights, routes, activation(numerics), numerics)
    return total, moe.dense_weights(routes, scores.shape[1])
