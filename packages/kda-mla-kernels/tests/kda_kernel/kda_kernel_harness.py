"""A kernel of nothing but Kimi delta attention, with random layers: the stage and its commit."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from delta_kernel_harness import DeltaNetwork
from kda_mla_kernels import kda, norm
from kda_mla_kernels.kda.kernel import KdaProjected, KdaShape, KdaVectors, KimiDeltaAttention

SMALL = KdaShape(key_heads=2, value_heads=2, key_dim=16, value_dim=32, taps=4)
LOWER_BOUND = -5.0


@dataclass(frozen=True)
class Net(DeltaNetwork):
    """Layers of Kimi delta attention."""

    shape: KdaShape = SMALL
    eps: float = 1e-5
    kind: Any = KimiDeltaAttention
    slots: int = 2
    together: int = 1

    def stage(self, block):
        held = self.numerics.activation
        policy = (self.numerics, self.eps, held, LOWER_BOUND)
        return self.kind(self.shape, block, *policy, slots=self.slots, together=self.together)

    @staticmethod
    def step(stage, *arguments):
        return stage(*arguments)

    @cached_property
    def a_log(self):
        """f32 [Nl, H], as a checkpoint has it."""
        draw = np.random.default_rng(4).normal
        return jnp.asarray(draw(size=(self.layers, self.shape.value_heads)), jnp.float32)

    @cached_property
    def vectors(self):
        shape, draw = self.shape, np.random.default_rng(1).normal
        slope = jnp.repeat(jnp.exp(self.a_log), shape.key_dim, axis=-1)[:, None]
        return KdaVectors(
            taps=jnp.asarray(draw(size=(self.layers, shape.taps, shape.channels)), jnp.float32),
            slope=slope,
            dt_bias=jnp.asarray(draw(size=(self.layers, 1, shape.key_width)), jnp.float32),
            norm=jnp.asarray(1 + draw(size=(self.layers, 1, shape.value_dim)), jnp.float32),
        )

    def tokens(self, sequences, tokens, seed=3):
        """Projections of random inputs."""
        shape, draw = self.shape, np.random.default_rng(seed).normal
        widths = (shape.channels, shape.key_width, shape.value_heads, shape.value_width)
        lead = (self.layers, sequences, tokens)
        parts = [draw(size=(*lead, width)) for width in widths]
        return KdaProjected(*(jnp.asarray(part, self.numerics.activation) for part in parts))

    def reference_layer(self, vectors, memory, tokens, rows):
        shape, tail = self.shape, memory.tail[rows]
        convolved = kda.causal_convolution(tail, tokens.channels, vectors.taps, self.numerics)
        width, heads = shape.key_width, shape.value_heads

        def split(x):
            return x.reshape(*x.shape[:-1], heads, -1)

        q, k = kda.unit_heads(
            split(convolved[..., :width]), split(convolved[..., width:][..., :width])
        )
        a_log = jnp.log(split(vectors.slope[0])[..., 0])
        bias = split(vectors.dt_bias[0])
        log_decay, beta = kda.gates(split(tokens.rate), tokens.write, a_log, bias, LOWER_BOUND)
        v = split(convolved[..., 2 * width :]).astype(jnp.float32)
        states, out = jax.vmap(kda.sequence)(
            memory.delta[rows], kda.DeltaInputs(q, k, v, log_decay, beta)
        )
        out = norm.sigmoid_gated_rms_norm(
            self.numerics.round(out), split(tokens.gate), vectors.norm[0], self.eps, self.numerics
        )
        line = jnp.concatenate([tail, tokens.channels], axis=1)
        return out.reshape(*out.shape[:2], -1), line[:, -(shape.taps - 1) :], states
