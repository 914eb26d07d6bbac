"""The two Pallas calls: the step, which reads the state, and the commit, which writes it.

A kernel that exchanges with other ranks and aliases its state would get two copies of the state in
every program; a step that only reads and a commit that exchanges nothing get none.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kda_mla_kernels.backend.budget import VMEM_LIMIT_BYTES
from kda_mla_kernels.block import Where
from kda_mla_kernels.commit import Accepted, commit_in_place
from kda_mla_kernels.gdn.kernel import GdnMemory, GdnVectors
from kda_mla_kernels.gqa.kernel import GqaMemory, GqaVectors

from megakernel_qwen.kernel.plan import StepPlan
from megakernel_qwen.kernel.step import KernelRecords, Scalars, StepOutputs, run_step, step_scratch
from megakernel_qwen.kernel.weights import KernelWeights
from megakernel_qwen.xla.caches import Caches

__all__ = ["call_commit", "call_step"]

STEP_COLLECTIVE_ID = 0

_SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)
_VMEM = pl.BlockSpec(memory_space=pltpu.VMEM)
_HBM = pl.BlockSpec(memory_space=pltpu.HBM)


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
            Scalars(_SMEM, Where(_SMEM, _SMEM), _SMEM),
            _weight_specs(),
            GdnMemory(_HBM, _HBM),
            GqaMemory(_HBM, _HBM),
        ],
        out_specs=StepOutputs(_VMEM, _VMEM, _VMEM, _HBM, _HBM),
        scratch_shapes=[cast(Any, step_scratch(plan))],
        compiler_params=plan.barrier.compiler_params(
            STEP_COLLECTIVE_ID, checks=bool(interpret), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
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
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
            disable_bounds_checks=not interpret,
            disable_semaphore_checks=not interpret,
        ),
        interpret=interpret,
    )
    return Caches(moved_gdn.tail, moved_gdn.delta, moved_gqa.keys, moved_gqa.values)


def _weight_specs() -> KernelWeights:
    """Large arrays stay in HBM; small vectors are copied to VMEM before the kernel."""
    return KernelWeights(
        image=_HBM,
        gates=_HBM,
        embedding=_HBM,
        mixer_gain=_VMEM,
        mlp_gain=_VMEM,
        final_gain=_VMEM,
        gdn=GdnVectors(*(_VMEM for _ in fields(GdnVectors))),
        gqa=GqaVectors(*(_VMEM for _ in fields(GqaVectors))),
    )
