"""The two mixers of a layer between its norm and the sum over ranks.

Both leave this rank's part of their output projection in ``scratch.partial``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from kda_mla_kernels.block import row_sums
from kda_mla_kernels.kda.kernel import KdaProjected
from kda_mla_kernels.mla import output_gate
from kda_mla_kernels.mla.kernel import MlaInputs
from vmem_pool.stream import SegmentReader, matvec

from megakernel_kimi.kernel.loads import Turns
from megakernel_kimi.kernel.refs import Refs
from megakernel_kimi.kernel.stream import key_up, value_up

__all__ = ["beta_loads", "kimi_delta_attention", "latent_attention"]


def beta_loads(refs: Refs) -> Turns:
    """Rows of the projection to beta, KDA layer by KDA layer."""
    vectors = refs.scratch.vectors
    return Turns(refs.weights.beta, vectors.beta, vectors.beta_sems)


def kimi_delta_attention(refs: Refs, index: Any, pos: Any) -> Any:
    """KDA layer ``index``; then the next one's loads start. Returns where the stream stands."""
    plan, scratch, where = refs.plan, refs.scratch, refs.scalars.where
    reader = refs.stream.segment("kda", pos)
    out = plan.kda(
        scratch.kda,
        refs.memory.kda,
        refs.weights.kda,
        _kda_projections(refs, reader, index),
        where,
        index,
        refs.out.kda,
    )

    @pl.when(index + 1 < len(plan.model.layout.config.kda_layers))
    def _() -> None:
        beta_loads(refs).start(index + 1)
        plan.kda.start(scratch.kda, refs.memory.kda, where, index + 1)

    scratch.mixers.kda_out[...] = out
    _product(refs, reader, "out", scratch.mixers.kda_out, scratch.partial)
    return reader.done()


def _kda_projections(refs: Refs, reader: SegmentReader, index: Any) -> KdaProjected:
    mixers, layout = refs.scratch.mixers, refs.plan.model.layout
    wide = layout.kda_width
    _product(refs, reader, "front", refs.scratch.normed, mixers.kda_front, group=2)
    mixers.kda_low[...] = mixers.kda_front[:, 4 * wide :]
    _product(refs, reader, "rate", mixers.kda_low, mixers.kda_rate)
    return KdaProjected(
        channels=mixers.kda_front[:, : 3 * wide],
        rate=mixers.kda_rate[...],
        write=_beta(refs, index),
        gate=mixers.kda_front[:, 3 * wide : 4 * wide],
    )


def _beta(refs: Refs, index: Any) -> jax.Array:
    """[P, H] rounded: a few columns, which a matrix unit would take as long for as for 128."""
    x = refs.scratch.normed[...].astype(jnp.float32)
    rows = beta_loads(refs).take(index)
    columns = []
    for head in range(refs.plan.model.layout.kda_heads):
        row = rows[head : head + 1, :].astype(jnp.float32)
        columns.append(row_sums(x * row))
    return refs.plan.model.numerics.round(jnp.concatenate(columns, axis=1))


def latent_attention(refs: Refs, index: Any, pos: Any) -> Any:
    """MLA layer ``index``; then the next one's loads start. Returns where the stream stands."""
    plan, scratch, where = refs.plan, refs.scratch, refs.scalars.counted
    reader = refs.stream.segment("mla", pos)
    inputs = _mla_inputs(refs, reader, index)
    found = plan.mla(scratch.mla, refs.memory.mla, inputs, where, index, refs.out.mla)
    mixed = _of_own_heads(refs, found, index)

    @pl.when(index + 1 < len(plan.model.layout.config.mla_layers))
    def _() -> None:
        plan.mla.start(scratch.mla, refs.memory.mla, where, index + 1)

    scratch.mixers.mla_out[...] = _gated_values(refs, reader, mixed)
    _product(refs, reader, "out", scratch.mixers.mla_out, scratch.partial)
    return reader.done()


def _mla_inputs(refs: Refs, reader: SegmentReader, index: Any) -> MlaInputs:
    """Low-rank queries and the latent, gathered from the lanes; the gate runs in the shadow."""
    plan, mixers = refs.plan, refs.scratch.mixers
    config, numerics = plan.model.layout.config, plan.model.numerics
    gather, gathered = plan.gather_low, refs.scratch.gather_low
    _product(refs, reader, "front", refs.scratch.normed, mixers.mla_front)
    handle = gather.start(gathered, mixers.mla_front[...], index)
    _product(refs, reader, "gate", refs.scratch.normed, mixers.mla_gate)
    low, rows = gather.finish(handle, (config.q_lora_rank, config.mla_cache_width))
    gains = refs.weights.low_gain[index]
    mixers.mla_low[...] = _normed(refs, low, gains[:, : config.q_lora_rank])
    _product(refs, reader, "query", mixers.mla_low, mixers.mla_query)
    own, shared = _split_queries(refs)
    for head, part in enumerate(own):
        mixers.mla_own[head] = part
        _product(refs, reader, key_up(head), mixers.mla_own.at[head], mixers.mla_latent.at[head])
    q_latent, q_shared = _of_attending_heads(
        refs, [mixers.mla_latent[head] for head in range(len(own))], shared, index
    )
    latent = _normed(refs, rows[:, : config.kv_lora_rank], gains[:, config.q_lora_rank :])
    return MlaInputs(
        q_latent=q_latent,
        q_shared=q_shared,
        latent=latent,
        shared=numerics.round(rows[:, config.kv_lora_rank :]),
    )


def _of_attending_heads(
    refs: Refs, latent: list[jax.Array], shared: list[jax.Array], index: Any
) -> tuple[jax.Array, jax.Array]:
    """[P, heads, C] and [P, heads, D] queries of the heads that attend on this rank."""
    exchange = refs.plan.position_exchange
    if exchange is None:
        return jnp.stack(latent, axis=1), jnp.stack(shared, axis=1)
    return exchange.gather(refs.scratch.position_exchange, latent, shared, index)


def _of_own_heads(refs: Refs, found: jax.Array, index: Any) -> list[jax.Array]:
    """[P, C] mixed latents of each head of this rank."""
    exchange = refs.plan.position_exchange
    if exchange is None:
        return [found[:, head] for head in range(refs.plan.model.layout.mla_heads)]
    return exchange.merge(refs.scratch.position_exchange, found, index)


def _split_queries(refs: Refs) -> tuple[list[jax.Array], list[jax.Array]]:
    """Own and shared dims of each head's queries."""
    config = refs.plan.model.layout.config
    heads = jnp.split(refs.scratch.mixers.mla_query[...], refs.plan.model.layout.mla_heads, axis=1)
    width = config.qk_nope_head_dim
    return [head[:, :width] for head in heads], [head[:, width:] for head in heads]


def _gated_values(refs: Refs, reader: SegmentReader, mixed: list[jax.Array]) -> jax.Array:
    """[P, H·V] values of the mixed latents [P, C] of each head, gated."""
    mixers = refs.scratch.mixers
    for head, part in enumerate(mixed):
        mixers.mla_latent[head] = part
        _product(
            refs, reader, value_up(head), mixers.mla_latent.at[head], mixers.mla_value.at[head]
        )
    out = jnp.concatenate([mixers.mla_value[head] for head in range(len(mixed))], axis=1)
    return output_gate(out, mixers.mla_gate[...], refs.plan.model.numerics)


def _normed(refs: Refs, x: jax.Array, gain: jax.Array) -> jax.Array:
    return refs.normed(x, gain, refs.plan.model.layout.config.lora_norm_eps)


def _product(
    refs: Refs, reader: SegmentReader, name: str, x: Any, out: Any, group: int = 1
) -> None:
    """One slot at a time unless said otherwise: code that is too long is fetched while running."""
    matvec(reader, name, x, out, group=group, precision=refs.plan.model.numerics.precision)
