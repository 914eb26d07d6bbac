"""A kernel of nothing but gated delta nets, with random layers: the stage and its commit."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from delta_kernel_harness import DeltaNetwork
from kda_mla_kernels import gdn, norm
from kda_mla_kernels.gdn.kernel import DeltaNet, GdnShape, GdnVectors

SMALL = GdnShape(key_heads=2, value_heads=4, key_dim=16, value_dim=32, taps=4)


@dataclass(frozen=True)
class Net(DeltaNetwork):
    """Gated delta nets."""

    shape: GdnShape = SMALL
    kind: Any = DeltaNet

    def stage(self, block):
        return self.kind(self.shape, block, self.numerics, self.eps, self.numerics.activation)

    @staticmethod
    def step(stage, scratch, memory, vectors, tokens, *rest):
        projected, gates = tokens
        return stage(scratch, memory, vectors, projected, gates[...], *rest)

    @cached_property
    def vectors(self):
        shape, draw = self.shape, np.random.default_rng(1).normal
        return GdnVectors(
            taps=jnp.asarray(draw(size=(self.layers, shape.taps, shape.channels)), jnp.float32),
            a_log=jnp.asarray(draw(size=(self.layers, 1, shape.value_heads)), jnp.float32),
            dt_bias=jnp.asarray(draw(size=(self.layers, 1, shape.value_heads)), jnp.float32),
            norm=jnp.asarray(1 + draw(size=(self.layers, 1, shape.value_dim)), jnp.float32),
        )

    def tokens(self, sequences, tokens, seed=3):
        """Projections and gates."""
        shape, draw = self.shape, np.random.default_rng(seed).normal
        size = (self.layers, sequences, tokens)
        projected = draw(size=(*size, shape.channels + shape.value_width))
        gates = draw(size=(*size, 2 * shape.value_heads))
        rounded = jnp.asarray(gates, self.numerics.activation).astype(jnp.float32)
        return jnp.asarray(projected, self.numerics.activation), rounded

    def reference_layer(self, vectors, memory, tokens, rows):
        shape, (projected, gates) = self.shape, tokens
        inputs, z = projected[..., : shape.channels], projected[..., shape.channels :]
        tail = memory.tail[rows]
        convolved = gdn.causal_convolution(tail, inputs, vectors.taps, self.numerics)
        q, k, v = gdn.split_heads(
            convolved, shape.key_heads, shape.key_dim, shape.value_heads, shape.value_dim
        )
        b, a = jnp.split(gates, 2, axis=-1)
        log_decay, beta = gdn.gates(a, b, vectors.a_log[0], vectors.dt_bias[0], self.numerics)
        x = gdn.GdnInputs(q, k, v, log_decay, beta)
        states, out = jax.vmap(gdn.sequence)(memory.delta[rows], x)
        out = norm.gated_rms_norm(
            self.numerics.round(out),
            z.reshape(out.shape),
            vectors.norm[0],
            self.eps,
            self.numerics,
        )
        line = jnp.concatenate([tail, inputs], axis=1)
        return out.reshape(*out.shape[:2], -1), line[:, -(shape.taps - 1) :], states
