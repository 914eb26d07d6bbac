"""The compiled programs of the kernel backend; prefill is XLA's, over the kernel's weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from kda_mla_kernels import backend
from kda_mla_kernels.backend import gather_logits
from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.kda.kernel import KdaMemory
from kda_mla_kernels.mla.kernel import MlaMemory

from megakernel_kimi.kernel.calls import call_commit, call_step
from megakernel_kimi.kernel.layers import StreamedLayers, head_matrix
from megakernel_kimi.kernel.plan import KernelModel, StepPlan
from megakernel_kimi.kernel.refs import KernelRecords, Memory, Scalars, StepOutputs
from megakernel_kimi.kernel.weights import MIX, NORM, KernelWeights
from megakernel_kimi.xla.caches import Caches
from megakernel_kimi.xla.programs import Held, Programs

__all__ = ["KernelPrograms"]


@dataclass(frozen=True)
class KernelPrograms(backend.KernelPrograms, Programs):
    """All programs of one model on one mesh; caches and weights are those of the kernel."""

    model: KernelModel
    interpret: Any
    """as in ``pallas_call``; see :func:`kda_mla_kernels.backend.interpreter_for`"""

    def _held(self, weights: KernelWeights) -> Held:
        """See the base class."""
        rows, last = self.rank.layout.vocab_rows, weights.hidden[-1]

        def columns(normed: jax.Array) -> jax.Array:
            table = head_matrix(self.model, weights)
            return self.rank.numerics.dot(normed, table)[:, :rows]

        layers = StreamedLayers(self.model, weights)
        return Held(weights.embedding[:rows], layers, last[MIX], last[NORM], columns)

    def gathered(self, logits: jax.Array) -> jax.Array:
        """See the base class."""
        layout = self.rank.layout
        return gather_logits(logits[:, : layout.vocab_rows], layout.config.vocab_size)

    def plan(self, block: Block, candidates: int = 0) -> StepPlan:
        """See the base class."""
        return StepPlan(self.model, block, candidates)

    def run_step(
        self, plan: StepPlan, weights: KernelWeights, caches: Caches, tokens: Any, where: Where
    ) -> StepOutputs:
        """See the base class."""
        table = jnp.asarray(self.model.table)
        scalars = Scalars(tokens, where, self.rank.held_positions.where(where), table)
        return call_step(plan, weights, _memory(caches), scalars, self.interpret)

    def run_commit(
        self, plan: StepPlan, caches: Caches, records: KernelRecords, where: Where, accepted: Any
    ) -> Caches:
        """See the base class."""
        counted = self.rank.held_positions.where(where)
        moved = call_commit(plan, _memory(caches), records, counted, accepted, self.interpret)
        return replace(
            caches,
            tail=moved.kda.tail,
            delta=moved.kda.delta,
            latents=moved.mla.latent,
            shared=moved.mla.shared,
        )


def _memory(caches: Caches) -> Memory:
    return Memory(KdaMemory(caches.tail, caches.delta), MlaMemory(caches.latents, caches.shared))
