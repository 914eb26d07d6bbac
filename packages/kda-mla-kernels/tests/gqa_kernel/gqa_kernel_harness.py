"""A kernel of nothing but attention, with random layers and caches: the stage and its commit."""

from dataclasses import dataclass
from functools import cache, cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels import gqa, norm
from kda_mla_kernels.block import Where
from kda_mla_kernels.gqa.kernel import Attention, GqaMemory, GqaShape, GqaVectors, commit_keys
from kda_mla_kernels.numerics import F32, Numerics
from tpu_collectives.testing import quick_options

SMEM, VMEM, HBM = (
    pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pltpu.HBM)
)


def layers_call(stage, layers, interpret=False, compiler_params=None):
    """``call(where, memory, vectors, projected) -> (outputs, records)``, all layers."""
    shape, rows = stage.shape, stage.block.padded

    def kernel(where, memory, vectors, projected, out, records, scratch):
        @pl.loop(0, layers)
        def _(layer):
            stage.start(scratch, memory, where, layer)
            page = projected.at[layer]
            out[layer] = stage(scratch, memory, vectors, page, where, layer, records)

        stage.drain(scratch, records)

    activation = stage.numerics.activation
    return pl.pallas_call(
        kernel,
        name="gqa_layers",
        out_shape=(
            jax.ShapeDtypeStruct((layers, rows, shape.query_width), activation),
            jax.ShapeDtypeStruct((layers, rows, shape.record_width), stage.held),
        ),
        in_specs=[Where(SMEM, SMEM), GqaMemory(HBM, HBM), GqaVectors(VMEM, VMEM), VMEM],
        out_specs=(VMEM, HBM),
        scratch_shapes=[stage.scratch()],
        interpret=interpret,
        compiler_params=compiler_params,
    )


@cache
def stage_call(net, block, interpret):
    """Jitted once for all tests of a file."""
    params = pltpu.InterpretParams(**dict(interpret))
    return jax.jit(
        layers_call(net.stage(block), net.layers, params), compiler_options=quick_options()
    )


@cache
def commit_call(net, block, interpret):
    """Jitted once for all tests of a file."""
    params = pltpu.InterpretParams(**dict(interpret))
    run = partial(commit_keys, net.shape, block, net.held, interpret=params)
    return jax.jit(run, compiler_options=quick_options())


SMALL = GqaShape(query_heads=6, kv_heads=2, head_dim=32, rotary_dim=8, theta=1e4)


@dataclass(frozen=True)
class Net:
    """Some attention layers with random weights, and a cache of several rows."""

    shape: GqaShape = SMALL
    numerics: Numerics = F32
    wide: bool = False
    slots: int = 384
    tile: int = 128
    layers: int = 2
    rows: int = 5
    eps: float = 1e-6

    @property
    def held(self):
        return jnp.dtype(jnp.float32) if self.wide else self.numerics.activation

    def stage(self, block):
        sizes = self.eps, self.held, self.slots, self.tile
        return Attention(self.shape, block, self.numerics, *sizes)

    @cached_property
    def vectors(self):
        draw = np.random.default_rng(1).normal
        size = (self.layers, 1, self.shape.head_dim)
        gains = [jnp.asarray(1 + 0.2 * draw(size=size), jnp.float32) for _ in range(2)]
        return GqaVectors(*gains)

    @cached_property
    def memory(self):
        """Every slot is filled: what lies at or behind a position is stale."""
        draw, shape = np.random.default_rng(2).normal, self.shape
        heads = (self.layers, self.rows, shape.kv_heads)

        def rounded(*size):
            return self.numerics.round(jnp.asarray(draw(size=size))).astype(self.held)

        keys = rounded(*heads, shape.head_dim, self.slots)
        return GqaMemory(keys, rounded(*heads, self.slots, shape.head_dim))

    def tokens(self, sequences, tokens, seed=3):
        """Projections [layers, S, T, projected width]."""
        size = (self.layers, sequences, tokens, self.shape.projected_width)
        drawn = np.random.default_rng(seed).normal(size=size)
        return jnp.asarray(drawn, self.numerics.activation)

    def run(self, block, memory, projected, where, **interpret):
        """One step of all layers: outputs f32 [Nf, P, H·D] and records [Nf, P, record width]."""
        padding = [(0, 0), (0, block.padded - block.rows), (0, 0)]
        padded = jnp.pad(projected.reshape(self.layers, block.rows, -1), padding)
        call = stage_call(self, block, tuple(interpret.items()))
        out, records = call(where, memory, self.vectors, padded)
        return np.asarray(out.astype(jnp.float32)), records

    def commit(self, block, memory, records, where, accepted, **interpret):
        """The memory after the first ``accepted`` tokens of each sequence."""
        call = commit_call(self, block, tuple(interpret.items()))
        return call(memory, records, where, jnp.asarray(accepted, jnp.int32))

    def expected(self, memory, projected, where):
        """Outputs [Nf, S, T, H·D] and records [Nf, S, T, record width] by the references, f32."""
        out, records = expected_call(self)(self.vectors, memory, projected, where)
        return np.asarray(out), np.asarray(records)

    def layer(self, vectors, memory, projected, where):
        """A layer by the references: [S, T, H·D] and [S, T, record width]."""
        shape, numerics = self.shape, self.numerics
        s, t, _ = projected.shape
        widths = np.cumsum([shape.query_width, shape.query_width, shape.key_width])
        heads = [x.reshape(s, t, -1, shape.head_dim) for x in jnp.split(projected, widths, axis=2)]
        q, gate, k, v = heads
        positions = where.positions[:, None] + jnp.arange(t)
        angles = gqa.rotary_angles(positions, shape.rotary_dim, shape.theta, numerics)

        def turned(x, gain):
            return gqa.apply_rotary(norm.rms_norm(x, gain, self.eps, numerics), angles, numerics)

        q, k = turned(q, vectors.q_gain[0]), turned(k, vectors.k_gain[0])
        keys, values = memory.keys[where.rows], memory.values[where.rows]
        for n in range(s):
            columns = k[n].astype(keys.dtype)
            keys = keys.at[n, :, :, positions[n]].set(columns)
            values = values.at[n, :, positions[n]].set(v[n].astype(values.dtype))
        out = gqa.output_gate(self.attention(q, keys, values, positions), gate, numerics)
        record = jnp.concatenate([k.reshape(s, t, -1), v.reshape(s, t, -1)], axis=-1)
        return [x.reshape(s, t, -1).astype(jnp.float32) for x in (out, record)]

    def attention(self, q, keys, values, positions):
        """In one piece where that rounds alike; in bf16 a weight is rounded to its tile's scale."""
        if self.numerics is F32:
            columns = jnp.swapaxes(keys, 2, 3)
            return gqa.plain_attention(q, columns, values, positions, self.numerics)

        def fetch(start):
            cut = jax.lax.dynamic_slice_in_dim
            return cut(keys, start, self.tile, axis=3), cut(values, start, self.tile, axis=2)

        return gqa.blocked_attention(q, fetch, positions, self.numerics, self.tile)


@cache
def expected_call(net):
    """Jitted once for all tests of a file."""

    def layers(vectors, memory, projected, where):
        pages = vectors, memory, projected
        return jax.lax.map(lambda page: net.layer(*page, where), pages)

    return jax.jit(layers, compiler_options=quick_options())


def where(rows, positions):
    # NumPy's, so that a test file can name some without starting a backend.
    return Where(np.asarray(rows, np.int32), np.asarray(positions, np.int32))
