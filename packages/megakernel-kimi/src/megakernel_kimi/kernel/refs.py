"""What a step works with: its scalars, outputs and scratch, and all references in one place.

Letters: M rows, P padded rows, D hidden, F feature layers; W KDA channels, H heads of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels.backend.budget import buffers, fit_ring
from kda_mla_kernels.block import Where, by_sublanes
from kda_mla_kernels.head import Candidates
from kda_mla_kernels.kda.kernel import KdaMemory
from kda_mla_kernels.mla.kernel import MlaMemory
from kda_mla_kernels.norm import stepwise_rms_norm
from vmem_pool.stream import Ring, Stream, StreamPlan, ring_scratch

from megakernel_kimi.kernel.plan import StepPlan, SublayerTable
from megakernel_kimi.kernel.weights import (
    HIDDEN_VECTORS,
    KernelWeights,
    beta_rows,
    bias_columns,
    weight_shapes,
)

__all__ = [
    "KernelRecords",
    "Memory",
    "Refs",
    "Scalars",
    "StepOutputs",
    "StepScratch",
    "planned_stream",
    "step_scratch",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scalars:
    """What a step is told in SMEM."""

    tokens: Any
    """i32 [M]"""
    where: Where
    counted: Where
    """the same with positions counted from the first that this rank holds"""
    table: Any
    """i32 [fields of SublayerTable, sublayers]"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """The state, in HBM; a step only reads it."""

    kda: KdaMemory
    mla: MlaMemory


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelRecords:
    """What a step would have done to the state."""

    kda: Any
    """f32 [Nk, P, record width]"""
    mla: Any
    """[Nm, P, record width]"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutputs:
    """What a step returns, per rank."""

    tokens: Any
    """i32 [P, 1], VMEM: each row's best token of the whole vocabulary, equal on all ranks"""
    logits: Any
    """f32 [P, columns of the rank's head], VMEM"""
    candidates: Candidates | None
    """this rank's best, VMEM, if the plan asks for them"""
    features: Any
    """[F, P, D], VMEM: the prefix that enters each feature layer"""
    kda: Any
    """f32 [Nk, P, record width], HBM"""
    mla: Any
    """[Nm, P, record width], HBM"""

    @property
    def records(self) -> KernelRecords:
        """What the commit applies."""
        return KernelRecords(self.kda, self.mla)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VectorScratch:
    """Small weights of a sublayer, two at a time."""

    hidden: Any
    """f32 [2, 2, D]"""
    beta: Any
    """[2, B, D]"""
    router: Any
    """f32 [2, 1, ...]"""
    hidden_sems: Any
    beta_sems: Any
    router_sems: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixerScratch:
    """Inputs and outputs of the mixers' products, activation dtype unless noted."""

    kda_front: Any
    """[P, 4 W + K] queries, keys, values, gate, first factor of the decay"""
    kda_low: Any
    """[P, K] the last of these"""
    kda_rate: Any
    """[P, W]"""
    kda_out: Any
    """[P, W]"""
    mla_front: Any
    """[P, columns of a lane]"""
    mla_gate: Any
    """[P, H·V]"""
    mla_low: Any
    """[P, q_lora]"""
    mla_query: Any
    """[P, H·(N + R)]"""
    mla_own: Any
    """[H, P, N]"""
    mla_latent: Any
    """[H, P, C]"""
    mla_value: Any
    """[H, P, V]"""
    mla_out: Any
    """[P, H·V]"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertsScratch:
    """Inputs and outputs of the products around routed experts."""

    front: Any
    """f32 [P, columns of a lane], latent and router logits"""
    normed: Any
    """[P, C] the normed sum of routed experts"""
    up: Any
    """f32 [P, hidden columns of a lane]"""
    out: Any
    """[P, hidden columns of a lane], what the prefix gets"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepScratch:
    """VMEM and semaphores of a step."""

    ring: Ring | None
    embedding: Any
    residual: Any
    kda: Any
    mla: Any
    dense: Any
    shared: Any
    experts: Any
    reduce: Any
    sum_experts: Any
    gather_low: Any
    gather_latent: Any
    gather_hidden: Any
    position_exchange: Any
    """None where every rank holds all positions"""
    arg_max: Any
    vectors: VectorScratch
    mixers: MixerScratch
    around: ExpertsScratch
    normed: Any
    """[P, D] input of a projection"""
    partial: Any
    """f32 [P, D] this rank's part of a projection's sum"""


@dataclass(frozen=True)
class Refs:
    """The references of one call and the plan of it. It exists while tracing."""

    plan: StepPlan
    scalars: Scalars
    weights: KernelWeights
    memory: Memory
    out: StepOutputs
    scratch: StepScratch
    stream: Stream

    def normed(self, x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        """The model's RMS norm of rows [P, N] with a weight f32 [1, N]."""
        norm = partial(stepwise_rms_norm, weight=weight, eps=eps, numerics=self.plan.model.numerics)
        return by_sublanes(norm, x)

    def sublayer(self, number: Any) -> SublayerTable:
        """What the table says of a sublayer: i32 scalars."""
        columns = range(len(fields(SublayerTable)))
        return SublayerTable(*(self.scalars.table[column, number] for column in columns))


@cache
def planned_stream(plan: StepPlan) -> StreamPlan:
    """The model's stream with the ring that fits beside everything else in VMEM.

    Raises:
        ConfigError: none does; the message names the largest buffers.
    """
    outputs = StepOutputs(**plan.output_shapes())
    weights = weight_shapes(plan.model.layout, plan.model.expert_shape, plan.model.held)
    others = buffers(
        _work(plan),
        {"logits": outputs.logits, "candidates": outputs.candidates, "features": outputs.features},
        weights.kda,
    )
    return fit_ring(plan.model.stream, others | plan.spilled())


def step_scratch(plan: StepPlan) -> StepScratch:
    """The entry of ``scratch_shapes``."""
    work = _work(plan)
    return StepScratch(**{**vars(work), "ring": ring_scratch(planned_stream(plan))})


def _work(plan: StepPlan) -> StepScratch:
    """All scratch but the ring."""
    rows, model, exchange = plan.block.padded, plan.model, plan.position_exchange
    hidden = model.layout.config.hidden_size
    return StepScratch(
        ring=None,
        embedding=plan.embedding.scratch(),
        residual=plan.residual.scratch(),
        kda=plan.kda.scratch(),
        mla=plan.mla.scratch(),
        dense=plan.dense.scratch(),
        shared=plan.shared.scratch(),
        experts=plan.experts.scratch(),
        reduce=plan.reduce.scratch(),
        sum_experts=plan.sum_experts.scratch(),
        gather_low=plan.gather_low.scratch(),
        gather_latent=plan.gather_latent.scratch(),
        gather_hidden=plan.gather_hidden.scratch(),
        position_exchange=None if exchange is None else exchange.scratch(),
        arg_max=plan.arg_max.scratch(),
        vectors=_vectors(plan),
        mixers=_mixers(plan),
        around=ExpertsScratch(
            front=pltpu.VMEM((rows, sum(plan.gather_latent.parts)), jnp.float32),
            normed=pltpu.VMEM((rows, model.expert_shape.latent), model.held),
            up=pltpu.VMEM((rows, model.layout.hidden_columns), jnp.float32),
            out=pltpu.VMEM((rows, model.layout.hidden_columns), model.held),
        ),
        normed=pltpu.VMEM((rows, hidden), model.held),
        partial=pltpu.VMEM((rows, hidden), jnp.float32),
    )


def _vectors(plan: StepPlan) -> VectorScratch:
    layout, held = plan.model.layout, plan.model.held
    config = layout.config
    pair = pltpu.SemaphoreType.DMA((2,))
    router = bias_columns(layout) + config.routed_expert_hidden_size
    return VectorScratch(
        hidden=pltpu.VMEM((2, HIDDEN_VECTORS, config.hidden_size), jnp.float32),
        beta=pltpu.VMEM((2, beta_rows(layout), config.hidden_size), held),
        router=pltpu.VMEM((2, 1, router), jnp.float32),
        hidden_sems=pair,
        beta_sems=pair,
        router_sems=pair,
    )


def _mixers(plan: StepPlan) -> MixerScratch:
    rows, layout, held = plan.block.padded, plan.model.layout, plan.model.held
    config, heads, wide = layout.config, layout.mla_heads, layout.kda_width

    def flat(width: int) -> Any:
        return pltpu.VMEM((rows, width), held)

    def by_head(width: int) -> Any:
        return pltpu.VMEM((heads, rows, width), held)

    return MixerScratch(
        kda_front=flat(4 * wide + config.kda_head_dim),
        kda_low=flat(config.kda_head_dim),
        kda_rate=flat(wide),
        kda_out=flat(wide),
        mla_front=flat(sum(plan.gather_low.parts)),
        mla_gate=flat(layout.value_width),
        mla_low=flat(config.q_lora_rank),
        mla_query=flat(heads * config.qk_head_dim),
        mla_own=by_head(config.qk_nope_head_dim),
        mla_latent=by_head(config.kv_lora_rank),
        mla_value=by_head(config.v_head_dim),
        mla_out=flat(layout.value_width),
    )
