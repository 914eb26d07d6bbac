"""The two Pallas calls: the step, which reads the state, and the commit, which writes it.

A kernel that exchanges with other ranks and aliases its state would get two copies of the state in
every program; a step that only reads and a commit that exchanges nothing get none.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import jax
from jax.experimental import pallas as pl
from kda_mla_kernels.backend.calls import (
    HBM,
    SMEM,
    VMEM,
    candidate_specs,
    commit_params,
    step_params,
)
from kda_mla_kernels.block import Where
from kda_mla_kernels.commit import Accepted, commit_in_place
from kda_mla_kernels.kda.kernel import KdaMemory, KdaVectors
from kda_mla_kernels.mla.kernel import MlaMemory
from kda_mla_kernels.moe.kernel import ExpertImages

from megakernel_kimi.kernel.plan import StepPlan
from megakernel_kimi.kernel.refs import KernelRecords, Memory, Scalars, StepOutputs, step_scratch
from megakernel_kimi.kernel.step import run_step
from megakernel_kimi.kernel.weights import KernelWeights

__all__ = ["call_commit", "call_step"]


def call_step(
    plan: StepPlan, weights: KernelWeights, memory: Memory, scalars: Scalars, interpret: Any
) -> StepOutputs:
    """Runs the step on this rank; all ranks must do so.

    Args:
        weights, memory: this rank's; memory is read only.
        scalars: arrays.
        interpret: as in ``pallas_call``.
    """
    block = plan.block

    def kernel(
        scalars: Scalars, weights: KernelWeights, memory: Memory, out: StepOutputs, scratch: Any
    ) -> None:
        run_step(plan, scalars, weights, memory, out, scratch)

    return pl.pallas_call(
        kernel,
        name=f"kimi_step_s{block.sequences}_t{block.tokens}",
        out_shape=StepOutputs(**plan.output_shapes()),
        in_specs=[_scalar_specs(), _weight_specs(), _memory_specs()],
        out_specs=StepOutputs(VMEM, VMEM, candidate_specs(plan), VMEM, HBM, HBM),
        scratch_shapes=[cast(Any, step_scratch(plan))],
        compiler_params=step_params(plan, interpret),
        interpret=interpret,
    )(scalars, weights, memory)


def call_commit(
    plan: StepPlan,
    memory: Memory,
    records: KernelRecords,
    where: Where,
    accepted: jax.Array,
    interpret: Any,
) -> Memory:
    """Moves every sequence of the block by its first accepted tokens, in place.

    Args:
        memory: this rank's, donated.
        where: positions counted from the first that this rank holds.
        accepted: i32 [S].
    """

    def body(
        scratch: Any, memory: Memory, records: KernelRecords, where: Where, counts: Any
    ) -> None:
        plan.replay(scratch[0], memory.kda, records.kda, where, counts)
        plan.latents(scratch[1], memory.mla, records.mla, where, counts)

    return commit_in_place(
        f"kimi_commit_s{plan.block.sequences}_t{plan.block.tokens}",
        body,
        (plan.replay.scratch(), plan.latents.scratch()),
        memory,
        Accepted(where, accepted, records),
        compiler_params=commit_params(interpret),
        interpret=interpret,
    )


def _scalar_specs() -> Scalars:
    return Scalars(SMEM, Where(SMEM, SMEM), Where(SMEM, SMEM), SMEM)


def _memory_specs() -> Memory:
    return Memory(KdaMemory(HBM, HBM), MlaMemory(HBM, HBM))


def _weight_specs() -> KernelWeights:
    """Large arrays stay in HBM; small vectors are copied to VMEM before the kernel."""
    return KernelWeights(
        image=HBM,
        experts=ExpertImages(HBM, HBM, HBM),
        embedding=HBM,
        hidden=HBM,
        beta=HBM,
        router=HBM,
        low_gain=VMEM,
        kda=KdaVectors(*(VMEM for _ in fields(KdaVectors))),
    )
