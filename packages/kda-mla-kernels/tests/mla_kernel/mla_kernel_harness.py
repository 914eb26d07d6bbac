"""A kernel of nothing but latent attention, with random inputs and caches: stage and commit."""

from dataclasses import dataclass
from functools import cache, cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels import mla
from kda_mla_kernels.block import Where
from kda_mla_kernels.mla.kernel import (
    LatentAttention,
    LatentCommit,
    MlaInputs,
    MlaMemory,
    Split,
    commit_latents,
    record_width,
    unpack,
)
from kda_mla_kernels.numerics import F32, Numerics
from tpu_collectives.testing import quick_options

SMEM, VMEM, HBM = (
    pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pltpu.HBM)
)


def layers_call(stage, layers, interpret=False, compiler_params=None):
    """``call(where, memory, inputs) -> (outputs, records)``, all layers."""
    rows = stage.block.padded

    def kernel(where, memory, inputs, out, records, scratch):
        @pl.loop(0, layers)
        def _(layer):
            stage.start(scratch, memory, where, layer)
            page = jax.tree.map(lambda ref: ref[layer], inputs)
            out[layer] = stage(scratch, memory, page, where, layer, records)

        stage.drain(scratch, records)

    activation = jnp.dtype(jnp.float32) if stage.split else stage.numerics.activation
    width = record_width(stage.shape)
    return pl.pallas_call(
        kernel,
        name="mla_layers",
        out_shape=(
            jax.ShapeDtypeStruct((layers, rows, stage.heads, stage.result_width), activation),
            jax.ShapeDtypeStruct((layers, rows, width), stage.held),
        ),
        in_specs=[Where(SMEM, SMEM), MlaMemory(HBM, HBM), MlaInputs(*[VMEM] * 4)],
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
        layers_call(net.stage(block), net.layers, params),
        compiler_options=quick_options(same_bits=True),
    )


@cache
def commit_call(net, block, interpret):
    """Jitted once for all tests of a file."""
    params = pltpu.InterpretParams(**dict(interpret))
    run = partial(commit_latents, net.commits(block), interpret=params)
    return jax.jit(run, compiler_options=quick_options(same_bits=True))


SMALL = mla.MlaShape(key_dim=16, shared_dim=16, latent=32)


@dataclass(frozen=True)
class Net:
    """Some latent attention layers, and a cache of several rows.

    With a split, the cache holds the share of rank ``rank``; its slots are the rank's.
    """

    shape: mla.MlaShape = SMALL
    heads: int = 3
    numerics: Numerics = F32
    wide: bool = False
    slots: int = 384
    tile: int = 128
    split: Split | None = None
    layers: int = 2
    rows: int = 5

    @property
    def held(self):
        return jnp.dtype(jnp.float32) if self.wide else self.numerics.activation

    def stage(self, block):
        sizes = self.held, self.slots, self.tile, self.split
        return LatentAttention(self.shape, self.heads, block, self.numerics, *sizes)

    def commits(self, block):
        return LatentCommit(self.shape, block, self.held, self.slots, self.split)

    @cached_property
    def up(self):
        """Random up projections of keys and values, 16 values a head."""
        size = self.heads * (self.shape.key_dim + 16), self.shape.latent
        drawn = np.random.default_rng(4).normal(size=size) * self.shape.latent**-0.5
        return mla.split_up(jnp.asarray(drawn, self.numerics.activation), self.heads, 16)

    @cached_property
    def memory(self):
        """Every slot is filled: what lies at or behind a position is stale."""
        size = (self.layers, self.rows, self.slots, record_width(self.shape))
        cache = jnp.asarray(np.random.default_rng(2).normal(size=size))
        return self.memory_of(self.numerics.round(cache).astype(self.held))

    def memory_of(self, cache):
        """[..., L, C + D] as references have it."""
        latent, shared = jnp.split(cache, [self.shape.latent], axis=-1)
        return MlaMemory(latent, jnp.swapaxes(shared, -1, -2))

    @staticmethod
    def cache_of(memory):
        """The inverse."""
        return jnp.concatenate([memory.latent, jnp.swapaxes(memory.shared, -1, -2)], axis=-1)

    def tokens(self, sequences, tokens, seed=3):
        """Inputs [layers, S, T, ...]."""
        draw = np.random.default_rng(seed).normal
        rows, shape = (self.layers, sequences, tokens), self.shape
        queries = [draw(size=(*rows, self.heads, width)) for width in (shape.latent, 16)]
        fresh = [draw(size=(*rows, width)) for width in (shape.latent, shape.shared_dim)]
        return MlaInputs(*(jnp.asarray(x, self.numerics.activation) for x in queries + fresh))

    def run(self, block, memory, inputs, where, **interpret):
        """One step of all layers: outputs f32 [Nm, P, H, C (+ 128)], records [Nm, P, C + D]."""

        def rows(x):
            x = x.reshape(self.layers, block.rows, *x.shape[3:])
            missing = block.padded - block.rows
            return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))

        call = stage_call(self, block, tuple(interpret.items()))
        out, records = call(where, memory, jax.tree.map(rows, inputs))
        return np.asarray(out.astype(jnp.float32)), records

    def commit(self, block, memory, records, where, accepted, **interpret):
        """The memory after the first ``accepted`` tokens of each sequence."""
        call = commit_call(self, block, tuple(interpret.items()))
        return call(memory, records, where, jnp.asarray(accepted, jnp.int32))

    def expected(self, memory, inputs, where):
        """Mixed latents f32 [Nm, S, T, H, C] by the references."""
        return np.asarray(expected_call(self)(memory, inputs, where))

    def layer(self, memory, inputs, where):
        """A layer by the references."""
        s, t = inputs.latent.shape[:2]
        positions = where.positions[:, None] + jnp.arange(t)
        cache = self.cache_of(memory)[where.rows]
        rows = jnp.concatenate([inputs.latent, inputs.shared], axis=-1).astype(cache.dtype)
        for n in range(s):
            cache = cache.at[n, positions[n]].set(rows[n])
        q = jnp.concatenate([inputs.q_latent, inputs.q_shared], axis=-1)
        part = self.attention(q, cache, positions)
        return self.numerics.round(part.latent / part.total[..., None]).astype(jnp.float32)

    def attention(self, q, cache, positions):
        """In one piece where that rounds alike; in bf16 a weight is rounded to its tile's scale."""
        if self.numerics is F32:
            slots = jnp.arange(self.slots)
            return mla.attend(q, cache, slots, positions, self.shape, self.numerics)

        def fetch(index):
            return jax.lax.dynamic_slice_in_dim(cache, index * self.tile, self.tile, axis=1)

        share = mla.Share(self.tile, self.slots // self.tile)
        return mla.attend_blocked(q, fetch, share, positions, self.shape, self.numerics)


@cache
def expected_call(net):
    """Jitted once for all tests of a file."""

    def layers(memory, inputs, where):
        return jax.lax.map(lambda page: net.layer(*page, where), (memory, inputs))

    return jax.jit(layers, compiler_options=quick_options(same_bits=True))


def where(rows, positions):
    # NumPy's, so that a test file can name some without starting a backend.
    return Where(np.asarray(rows, np.int32), np.asarray(positions, np.int32))


def merged(parts):
    """The references' merge of packed outputs, one for each rank: f32 [..., C]."""
    joined = mla.merge(jax.tree.map(lambda *x: jnp.stack(x), *(unpack(part) for part in parts)))
    return np.asarray(joined.latent / joined.total[..., None])
