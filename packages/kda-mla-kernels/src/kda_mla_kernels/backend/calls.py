"""What the Pallas calls of all step and commit kernels have in common."""

from __future__ import annotations

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.backend.budget import VMEM_LIMIT_BYTES
from kda_mla_kernels.backend.step_plan import StepPlan
from kda_mla_kernels.head import Candidates

__all__ = ["HBM", "SMEM", "VMEM", "candidate_specs", "commit_params", "step_params"]

STEP_COLLECTIVE_ID = 0

SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)
VMEM = pl.BlockSpec(memory_space=pltpu.VMEM)
HBM = pl.BlockSpec(memory_space=pltpu.HBM)


def step_params(plan: StepPlan, interpret: Any) -> pltpu.CompilerParams:
    """Of a kernel that exchanges with other ranks. On a TPU the checks would only cost time."""
    return plan.barrier.compiler_params(
        STEP_COLLECTIVE_ID, checks=bool(interpret), vmem_limit_bytes=VMEM_LIMIT_BYTES
    )


def commit_params(interpret: Any) -> pltpu.CompilerParams:
    """Of a kernel that exchanges nothing."""
    return pltpu.CompilerParams(
        vmem_limit_bytes=VMEM_LIMIT_BYTES,
        disable_bounds_checks=not interpret,
        disable_semaphore_checks=not interpret,
    )


def candidate_specs(plan: StepPlan) -> Candidates | None:
    """Where a step leaves its candidates."""
    return Candidates(VMEM, VMEM) if plan.candidates else None
