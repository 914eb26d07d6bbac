"""The compiled programs of the kernel backend; prefill is XLA's, over the kernel's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from kda_mla_kernels import backend
from kda_mla_kernels.block import Block, Where

from megakernel_qwen.kernel.calls import call_commit, call_step
from megakernel_qwen.kernel.layers import StreamedLayers, head_matrix
from megakernel_qwen.kernel.plan import KernelModel, StepPlan
from megakernel_qwen.kernel.step import KernelRecords, Scalars, StepOutputs
from megakernel_qwen.kernel.weights import KernelWeights
from megakernel_qwen.xla.caches import Caches
from megakernel_qwen.xla.forward import Layers
from megakernel_qwen.xla.programs import Programs

__all__ = ["KernelPrograms"]


@dataclass(frozen=True)
class KernelPrograms(backend.KernelPrograms, Programs):
    """All programs of one model on one mesh; caches and weights are those of the kernel."""

    model: KernelModel
    interpret: Any
    """as in ``pallas_call``; see :func:`kda_mla_kernels.backend.interpreter_for`"""

    def _layers(self, weights: Any) -> Layers:
        return StreamedLayers(self.model, weights)

    def _head_logits(self, weights: Any, normed: jax.Array) -> jax.Array:
        table = head_matrix(self.model, weights)
        return self.gathered(self.rank.numerics.dot(normed, table))

    def gathered(self, logits: jax.Array) -> jax.Array:
        """See the base class."""
        return self._gathered(logits[:, : self.rank.layout.vocab_rows])

    def plan(self, block: Block, candidates: int = 0) -> StepPlan:
        """See the base class."""
        return StepPlan(self.model, block, candidates)

    def run_step(
        self, plan: StepPlan, weights: KernelWeights, caches: Caches, tokens: Any, where: Where
    ) -> StepOutputs:
        """See the base class."""
        scalars = Scalars(tokens, where, jnp.asarray(self.model.kinds))
        return call_step(plan, weights, caches, scalars, self.interpret)

    def run_commit(
        self, plan: StepPlan, caches: Caches, records: KernelRecords, where: Where, accepted: Any
    ) -> Caches:
        """See the base class."""
        return call_commit(plan, caches, records, where, accepted, self.interpret)
