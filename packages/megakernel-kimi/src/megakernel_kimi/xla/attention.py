"""The two attentions on one rank's heads.

Each takes M normed rows [M, D] and returns its f32 partial result [M, D], which the caller sums
over ranks. How a KDA layer treats its state is the memory of the program.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from kda_mla_kernels import kda, mla, norm
from kda_mla_kernels.backend import Batch, Carry, Memory, Slot, Window, write_positions
from kda_mla_kernels.gqa import KEY_BLOCK

from megakernel_kimi.layout import KimiLayout
from megakernel_kimi.weights import KdaWeights, MlaWeights
from megakernel_kimi.xla.caches import Caches
from megakernel_kimi.xla.rank import Rank, split_columns

__all__ = ["delta_attention", "latent_attention"]


def delta_attention(
    rank: Rank,
    weights: KdaWeights,
    x: jax.Array,
    batch: Batch,
    carry: Carry,
    slot: Slot,
    memory: Memory,
) -> tuple[jax.Array, Carry]:
    """Input projection, short convolution, delta rule, gated norm, output projection."""
    layout, config, numerics = rank.layout, rank.layout.config, rank.numerics
    heads = (layout.kda_heads, config.kda_head_dim)
    mixed, gate, write, low = split_columns(rank.project(x, weights.in_proj), layout.kda_columns)
    rate = rank.project(low, weights.decay)
    # Everything of one token alone is computed flat, in a shape that does not depend on S and T;
    # only the delta rule sees sequences.
    taps = config.conv_kernel_size
    tails = carry[0].tails_of(slot, batch.rows, taps - 1)
    line = jnp.concatenate([tails, batch.grid(mixed).astype(rank.held)], axis=1)
    channels = kda.convolve(batch.flat(kda.token_windows(line, taps)), weights.taps, numerics)
    q, k, v = (part.reshape(-1, *heads) for part in jnp.split(channels, 3, axis=-1))
    q, k = kda.unit_heads(q, k)
    log_decay, beta = kda.gates(
        rate.reshape(-1, *heads), write, weights.a_log, weights.dt_bias, config.gate_lower_bound
    )
    inputs = kda.DeltaInputs(q, k, v.astype(jnp.float32), log_decay, beta)
    carry, out = memory(carry, slot, batch, Window(line, inputs))
    gated = norm.sigmoid_gated_rms_norm(
        numerics.round(out),
        gate.reshape(-1, *heads),
        weights.norm,
        config.rms_norm_eps,
        numerics,
    )
    return numerics.dot(gated.reshape(-1, layout.kda_width), weights.out_proj), carry


def _fetch(caches: Caches, slot: Slot, rows: jax.Array, block: int) -> mla.FetchRows:
    """A reader of blocks that leaves the cache where it is."""

    def read(cache: jax.Array, axis: int, start: jax.Array) -> jax.Array:
        starts, sizes = [slot, 0, 0, 0], [1, *cache.shape[1:]]
        starts[axis], sizes[axis] = start, block
        return lax.dynamic_slice(cache, starts, sizes)[0, rows]

    def fetch(index: jax.Array) -> jax.Array:
        latents = read(caches.latents, 2, index * block)
        shared = read(caches.shared, 3, index * block)
        return jnp.concatenate([latents, jnp.swapaxes(shared, 1, 2)], axis=-1)

    return fetch


def _cache_blocks(layout: KimiLayout, caches: Caches) -> mla.Share:
    """How a rank's cache is read: its positions counted from the first that it holds."""
    split = layout.split
    block = min(KEY_BLOCK, caches.slots) if split is None else split.block
    stride = block if split is None else split.stride
    return mla.Share(block, caches.slots // block, stride=stride)


def latent_attention(
    rank: Rank, weights: MlaWeights, x: jax.Array, batch: Batch, carry: Carry, slot: Slot
) -> tuple[jax.Array, Carry]:
    """Low-rank queries and cache rows, absorbed attention, output gate, output projection."""
    layout, config, numerics = rank.layout, rank.layout.config, rank.numerics
    queries, row, gate = split_columns(rank.project(x, weights.in_proj), layout.mla_columns)
    low, row = rank.gather(
        jnp.concatenate([queries, row], axis=-1),
        (
            (layout.query_columns, config.q_lora_rank),
            (layout.row_columns, config.mla_cache_width),
        ),
    )
    eps = config.lora_norm_eps
    low = norm.stepwise_rms_norm(low, weights.q_norm, eps, numerics)
    q = rank.project(low, weights.q_b).reshape(-1, layout.mla_heads, config.qk_head_dim)
    latent, shared = jnp.split(row, [config.kv_lora_rank], axis=-1)
    latent = norm.stepwise_rms_norm(latent, weights.row_norm, eps, numerics)

    (caches, records), held = carry, rank.held_positions
    caches = replace(
        caches,
        latents=write_positions(caches.latents, slot, batch, batch.grid(latent), -2, held),
        shared=write_positions(caches.shared, slot, batch, batch.grid(shared), -1, held),
    )
    share = _cache_blocks(layout, caches)
    up = mla.UpProjection(weights.key_up, weights.value_up)
    shape = mla.MlaShape(config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank)
    part = mla.attend_blocked(
        rank.gather_heads(mla.absorb(batch.queries(q), up, numerics)),
        _fetch(caches, slot, batch.query_rows, share.block),
        share,
        held.counted(batch.queries(batch.flat(batch.positions))),
        shape,
        numerics,
    )
    out = batch.answers(mla.finish(rank.merge_positions(part), up, numerics))
    gated = mla.output_gate(out, gate.reshape(out.shape), numerics)
    return numerics.dot(gated.reshape(-1, layout.value_width), weights.out_proj), (caches, records)
