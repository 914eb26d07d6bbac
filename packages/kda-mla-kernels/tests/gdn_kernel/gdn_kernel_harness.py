"""A kernel of nothing but gated delta nets, with random layers: the stage and its commit."""

from dataclasses import dataclass
from functools import cache, cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels import gdn, norm
from kda_mla_kernels.block import Where
from kda_mla_kernels.gdn.kernel import (
    DeltaNet,
    GdnMemory,
    GdnShape,
    GdnVectors,
    commit_states,
)
from kda_mla_kernels.numerics import F32, Numerics

SMEM, VMEM, HBM = (
    pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pltpu.HBM)
)


def layers_call(stage, layers, interpret=False, compiler_params=None):
    """``call(where, memory, vectors, projected, gates) -> (outputs, records)``, all layers."""
    shape, block = stage.shape, stage.block

    def kernel(where, memory, vectors, projected, gates, out, records, scratch):
        @pl.loop(0, layers)
        def _(layer):
            stage.start(scratch, memory, where, layer)
            page = projected.at[layer]
            out[layer] = stage(scratch, memory, vectors, page, gates[layer], where, layer, records)

        stage.drain(scratch, records)

    return pl.pallas_call(
        kernel,
        name="gdn_layers",
        out_shape=(
            jax.ShapeDtypeStruct(
                (layers, block.padded, shape.value_width), stage.numerics.activation
            ),
            jax.ShapeDtypeStruct((layers, block.padded, shape.record_width), jnp.float32),
        ),
        in_specs=[
            Where(SMEM, SMEM),
            GdnMemory(HBM, HBM),
            GdnVectors(VMEM, VMEM, VMEM, VMEM),
            VMEM,
            VMEM,
        ],
        out_specs=(VMEM, HBM),
        scratch_shapes=[stage.scratch()],
        interpret=interpret,
        compiler_params=compiler_params,
    )


@cache
def stage_call(net, block, interpret):
    """Jitted once for all tests of a file."""
    params = pltpu.InterpretParams(**dict(interpret))
    call = layers_call(net.stage(block), net.layers, params)
    return jax.jit(call, compiler_options=net.compiler_options)


@cache
def commit_call(net, block, interpret):
    """Jitted once for all tests of a file."""
    params = pltpu.InterpretParams(**dict(interpret))
    run = partial(commit_states, net.shape, block, net.numerics.activation, interpret=params)
    return jax.jit(run, compiler_options=net.compiler_options)


SMALL = GdnShape(key_heads=2, value_heads=4, key_dim=16, value_dim=32, taps=4)


@dataclass(frozen=True)
class Net:
    """Some layers with random weights and a state of several rows."""

    shape: GdnShape = SMALL
    numerics: Numerics = F32
    layers: int = 2
    rows: int = 5
    eps: float = 1e-6
    kind: type[DeltaNet] = DeltaNet
    quick: bool = False
    """Compiles without optimising: twice as fast, but nothing fuses products into sums."""
    tag: str = ""
    """Keeps compiled calls of a patched kernel apart."""

    @property
    def compiler_options(self):
        return {"xla_backend_optimization_level": 0} if self.quick else {}

    def stage(self, block):
        return self.kind(self.shape, block, self.numerics, self.eps, self.numerics.activation)

    @cached_property
    def vectors(self):
        shape, draw = self.shape, np.random.default_rng(1).normal
        return GdnVectors(
            taps=jnp.asarray(draw(size=(self.layers, shape.taps, shape.channels)), jnp.float32),
            a_log=jnp.asarray(draw(size=(self.layers, 1, shape.value_heads)), jnp.float32),
            dt_bias=jnp.asarray(draw(size=(self.layers, 1, shape.value_heads)), jnp.float32),
            norm=jnp.asarray(1 + draw(size=(self.layers, 1, shape.value_dim)), jnp.float32),
        )

    @cached_property
    def memory(self):
        shape, draw = self.shape, np.random.default_rng(2).normal
        tail = draw(size=(self.layers, self.rows, shape.tail_rows, shape.channels))
        heads = (shape.value_heads, shape.key_dim, shape.value_dim)
        return GdnMemory(
            tail=jnp.asarray(tail, self.numerics.activation),
            delta=jnp.asarray(draw(size=(self.layers, self.rows, *heads)), jnp.float32),
        )

    def tokens(self, sequences, tokens, seed=3):
        """Projections and gates of [layers, S, T, ...], as the input projections leave them."""
        shape, draw = self.shape, np.random.default_rng(seed).normal
        size = (self.layers, sequences, tokens)
        projected = draw(size=(*size, shape.channels + shape.value_width))
        gates = draw(size=(*size, 2 * shape.value_heads))
        rounded = jnp.asarray(gates, self.numerics.activation).astype(jnp.float32)
        return jnp.asarray(projected, self.numerics.activation), rounded

    def run(self, block, memory, tokens, rows, **interpret):
        """One step of all layers: outputs [Nl, P, Hv·V] and records [Nl, P, record width]."""
        padding = [(0, 0), (0, block.padded - block.rows), (0, 0)]
        padded = [jnp.pad(x.reshape(self.layers, block.rows, -1), padding) for x in tokens]
        call = stage_call(self, block, tuple(interpret.items()))
        out, records = call(self.where(rows), memory, self.vectors, *padded)
        return np.asarray(out.astype(jnp.float32)), records

    def commit(self, block, memory, records, rows, accepted, **interpret):
        """The memory after the first ``accepted`` tokens of each sequence."""
        call = commit_call(self, block, tuple(interpret.items()))
        return call(memory, records, self.where(rows), jnp.asarray(accepted, jnp.int32))

    @staticmethod
    def where(rows):
        rows = jnp.asarray(rows, jnp.int32)
        return Where(rows, jnp.zeros_like(rows))

    def expected(self, memory, tokens, rows):
        """Outputs [Nl, S, T, Hv·V] and the state after all tokens, by the references."""
        rows = jnp.asarray(rows)
        layers = jax.jit(
            jax.vmap(self._layer, in_axes=(0, 0, 0, None)), compiler_options=self.compiler_options
        )
        out, tail, delta = layers(self.vectors, memory, tokens, rows)
        moved = GdnMemory(memory.tail.at[:, rows].set(tail), memory.delta.at[:, rows].set(delta))
        return np.asarray(out.astype(jnp.float32)), moved

    def _layer(self, vectors, memory, tokens, rows):
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
