"""The two token mixers and the feed-forward layer on one rank's share of the weights.

Each takes M normed rows [M, D] and returns its f32 partial result [M, D], which the caller sums
over ranks. How a gated delta net treats
its state is the memory of the program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from kda_mla_kernels import gdn, gqa, mlp, norm
from kda_mla_kernels.backend import Batch, Carry, Memory, Slot, Window, write_positions
from kda_mla_kernels.numerics import Numerics

from megakernel_qwen.layout import QwenLayout
from megakernel_qwen.weights import GdnWeights, GqaWeights, MlpWeights
from megakernel_qwen.xla.caches import Caches

__all__ = [
    "Rank",
    "feed_forward",
    "gated_attention",
    "gated_delta_net",
]


@dataclass(frozen=True)
class Rank:
    """What is the same for every layer of a program: sizes of one rank and the numerics."""

    layout: QwenLayout
    numerics: Numerics
    held: np.dtype
    """dtype that caches are held in, at least as wide as activations: see ``backend.held_dtype``"""


def split_columns(x: jax.Array, widths: tuple[int, ...]) -> list[jax.Array]:
    """Cuts the last axis into parts of these widths."""
    ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
    return jnp.split(x, ends, axis=-1)


def gated_delta_net(
    rank: Rank,
    weights: GdnWeights,
    x: jax.Array,
    batch: Batch,
    carry: Carry,
    slot: Slot,
    memory: Memory,
) -> tuple[jax.Array, Carry]:
    """Input projection, short convolution, delta rule, gated norm, output projection."""
    layout, config, numerics = rank.layout, rank.layout.config, rank.numerics
    mixed, z, b, a = split_columns(
        numerics.round(numerics.dot(x, weights.in_proj)), layout.gdn_columns
    )
    # Everything of one token alone is computed flat, in a shape that does not depend on S and T;
    # only the delta rule sees sequences.
    taps = config.linear_conv_kernel_dim
    tails = carry[0].tails_of(slot, batch.rows, taps - 1)
    line = jnp.concatenate([tails, batch.grid(mixed).astype(rank.held)], axis=1)
    channels = gdn.convolve(batch.flat(gdn.token_windows(line, taps)), weights.taps, numerics)
    dims = (config.linear_key_head_dim, config.linear_value_head_dim)
    q, k, v = gdn.split_heads(channels, layout.key_heads, dims[0], layout.value_heads, dims[1])
    log_decay, beta = gdn.gates(a, b, weights.a_log, weights.dt_bias, numerics)
    given = Window(line, gdn.GdnInputs(q, k, v, log_decay, beta))
    carry, out = memory(carry, slot, batch, given)
    heads = (layout.value_heads, config.linear_value_head_dim)
    gated = norm.gated_rms_norm(
        numerics.round(out),
        z.reshape(-1, *heads),
        weights.norm,
        config.rms_norm_eps,
        numerics,
    )
    return numerics.dot(gated.reshape(-1, layout.value_width), weights.out_proj), carry


def _fetch(caches: Caches, slot: Slot, rows: jax.Array, block: int) -> gqa.FetchKeys:
    """A reader of key and value blocks that leaves the cache where it is."""

    def fetch(start: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        def read(cache: jax.Array, axis: int) -> jax.Array:
            starts, sizes = [slot, 0, 0, 0, 0], [1, *cache.shape[1:]]
            starts[axis], sizes[axis] = start, block
            return jax.lax.dynamic_slice(cache, starts, sizes)[0, rows]

        return read(caches.keys, 4), read(caches.values, 3)

    return fetch


def gated_attention(
    rank: Rank, weights: GqaWeights, x: jax.Array, batch: Batch, carry: Carry, slot: Slot
) -> tuple[jax.Array, Carry]:
    """Input projection, head norms, rotary embedding, attention, output gate and projection."""
    layout, config, numerics = rank.layout, rank.layout.config, rank.numerics
    parts = split_columns(numerics.round(numerics.dot(x, weights.in_proj)), layout.gqa_columns)
    q, gate, k, v = (part.reshape(part.shape[0], -1, config.head_dim) for part in parts)
    angles = gqa.rotary_angles(
        batch.flat(batch.positions), config.rotary_dim, config.rope_theta, numerics
    )
    q = norm.rms_norm(q, weights.q_gain, config.rms_norm_eps, numerics)
    k = norm.rms_norm(k, weights.k_gain, config.rms_norm_eps, numerics)
    q, k = gqa.apply_rotary(q, angles, numerics), gqa.apply_rotary(k, angles, numerics)

    caches, records = carry
    caches = replace(
        caches,
        keys=write_positions(caches.keys, slot, batch, batch.grid(k), -1),
        values=write_positions(caches.values, slot, batch, batch.grid(v), -2),
    )
    block = min(gqa.KEY_BLOCK, caches.slots)
    fetch = _fetch(caches, slot, batch.query_rows, block)
    positions = batch.queries(batch.flat(batch.positions))
    out = gqa.blocked_attention(batch.queries(q), fetch, positions, numerics, block)
    gated = gqa.output_gate(batch.answers(out), gate, numerics)
    flat = gated.reshape(gated.shape[0], layout.query_heads * config.head_dim)
    return numerics.dot(flat, weights.out_proj), (caches, records)


def feed_forward(rank: Rank, weights: MlpWeights, x: jax.Array) -> jax.Array:
    """``down(silu(gate x) · up x)``."""
    both = rank.numerics.round(rank.numerics.dot(x, weights.gate_up))
    gate, up = jnp.split(both, 2, axis=-1)
    return rank.numerics.dot(mlp.swiglu(gate, up, rank.numerics), weights.down)
