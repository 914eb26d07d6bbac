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
from kda_mla_kernels.gdn.kernel import GdnMemory, GdnVectors
from kda_mla_kernels.gqa.kernel import GqaMemory, GqaVectors

from megakernel_qwen.kernel.plan import StepPlan
from megakernel_qwen.kernel.step import KernelRecords, Scalars, StepOutputs, run_step, step_scratch
from megakernel_qwen.kernel.weights import KernelWeights
from megakernel_qwen.xla.caches import Caches

__all__ = ["call_commit", "call_step"]


def call_step(
    plan: StepPlan, weights: KernelWeights, caches: Caches, scalars: Scalars, interpret: Any
) -> StepOutputs:
    """Runs the step on this rank; all ranks must do so.

    Args:
        weights, caches: this rank's; caches are read only.
        scalars: arrays.
        interpret: as in ``pallas_call``.
    """
    gdn, gqa = GdnMemory(caches.tail, caches.delta), GqaMemory(caches.keys, caches.values)
    block = plan.block

    def kernel(
        scalars: Scalars,
        weights: KernelWeights,
        gdn: GdnMemory,
        gqa: GqaMemory,
        out: StepOutputs,
        scratch: Any,
    ) -> None:
        run_step(plan, scalars, weights, gdn, gqa, out, scratch)

    return pl.pallas_call(
        kernel,
        name=f"qwen_step_s{block.sequences}_t{block.tokens}",
        out_shape=StepOutputs(**plan.output_shapes()),
        in_specs=[
            Scalars(SMEM, Where(SMEM, SMEM), SMEM),
            _weight_specs(),
            GdnMemory(HBM, HBM),
            GqaMemory(HBM, HBM),
        ],
        out_specs=StepOutputs(VMEM, VMEM, candidate_specs(plan), VMEM, HBM, HBM),
        scratch_shapes=[cast(Any, step_scratch(plan))],
        compiler_params=step_params(plan, interpret),
        interpret=interpret,
    )(scalars, weights, gdn, gqa)


def call_commit(
    plan: StepPlan,
    caches: Caches,
    records: KernelRecords,
    where: Where,
    accepted: jax.Array,
    interpret: Any,
) -> Caches:
    """Moves every sequence of the block by its first accepted tokens, in place.

    Args:
        caches: this rank's, donated.
        accepted: i32 [S].
    """
    gdn, gqa = GdnMemory(caches.tail, caches.delta), GqaMemory(caches.keys, caches.values)

    def body(
        scratch: Any,
        memory: tuple[GdnMemory, GqaMemory],
        records: KernelRecords,
        where: Where,
        counts: Any,
    ) -> None:
        plan.replay(scratch[0], memory[0], records.gdn, where, counts)
        plan.key_values(scratch[1], memory[1], records.gqa, where, counts)

    moved_gdn, moved_gqa = commit_in_place(
        f"qwen_commit_s{plan.block.sequences}_t{plan.block.tokens}",
        body,
        (plan.replay.scratch(), plan.key_values.scratch()),
        (gdn, gqa),
        Accepted(where, accepted, records),
        compiler_params=commit_params(interpret),
        interpret=interpret,
    )
    return Caches(moved_gdn.tail, moved_gdn.delta, moved_gqa.keys, moved_gqa.values)


def _weight_specs() -> KernelWeights:
    """Large arrays stay in HBM; small vectors are copied to VMEM before the kernel."""
    return KernelWeights(
        image=HBM,
        gates=HBM,
        embedding=HBM,
        mixer_gain=VMEM,
        mlp_gain=VMEM,
        final_gain=VMEM,
        gdn=GdnVectors(*(VMEM for _ in fields(GdnVectors))),
        gqa=GqaVectors(*(VMEM for _ in fields(GqaVectors))),
    )
