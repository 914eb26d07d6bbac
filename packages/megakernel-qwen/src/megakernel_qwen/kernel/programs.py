"""The compiled programs of the kernel backend.

Decode is a step over R sequences of one token and a commit; verify is a step over S sequences of
T tokens, and its commit comes when the caller knows how many were accepted. Prefill is the XLA
program over the same weights and the same caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from kda_mla_kernels.backend import SPLIT, WHOLE, Fed
from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.sampling import Sampling

from megakernel_qwen.kernel.calls import KernelRecords, call_commit, call_step
from megakernel_qwen.kernel.layers import StreamedLayers, head_matrix
from megakernel_qwen.kernel.plan import KernelModel, StepPlan
from megakernel_qwen.kernel.step import Scalars, StepOutputs
from megakernel_qwen.kernel.weights import KernelWeights
from megakernel_qwen.xla.caches import Caches
from megakernel_qwen.xla.forward import Layers
from megakernel_qwen.xla.programs import Programs

__all__ = ["KernelPrograms", "VerifyRecords", "interpreter_for"]


def interpreter_for(mesh: Mesh) -> Any:
    """How the kernels run on these devices: compiled on TPUs, interpreted elsewhere.

    One rank alone exchanges nothing, so Pallas' own interpreter can run it, which is several times
    faster than the one that simulates remote copies.
    """
    if mesh.devices.flat[0].platform == "tpu":
        return False
    return True if mesh.size == 1 else pltpu.InterpretParams()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VerifyRecords:
    """What a verify step leaves to commit."""

    records: KernelRecords
    positions: jax.Array
    """i32 [ranks, S] of each sequence's first token"""
    tokens: int = field(metadata={"static": True})
    """T"""


@dataclass(frozen=True)
class KernelPrograms(Programs):
    """All programs of one model on one mesh; caches and weights are those of the kernel."""

    model: KernelModel
    interpret: Any
    """as in ``pallas_call``; see :func:`interpreter_for`"""

    def _layers(self, weights: Any) -> Layers:
        return StreamedLayers(self.model, weights)

    def _head_logits(self, weights: Any, normed: jax.Array) -> jax.Array:
        table = head_matrix(self.model, weights)
        return self._gathered(self.rank.numerics.dot(normed, table))

    def _gathered(self, logits: jax.Array) -> jax.Array:
        """Columns of the rank's head, padding included -> f32 [M, V] of all."""
        return super()._gathered(logits[:, : self.rank.layout.vocab_rows])

    def _step(
        self, plan: StepPlan, weights: KernelWeights, caches: Caches, tokens: Any, where: Where
    ) -> StepOutputs:
        scalars = Scalars(tokens, where, jnp.asarray(self.model.kinds))
        return call_step(plan, weights, caches, scalars, self.interpret)

    def choose(
        self,
        weights: Any,
        caches: Caches,
        fed: Fed,
        sampling: Sampling | None,
        with_logits: bool,
    ) -> tuple[jax.Array, jax.Array | None, Caches]:
        """Greedy steps without logits take the kernel's own choice."""
        if sampling is not None or with_logits:
            return super().choose(weights, caches, fed, sampling, with_logits)
        chosen, caches = self.greedy_step(weights, caches, *fed)
        return chosen, None, caches

    def _greedy(self, weights: Any, caches: Caches, fed: Fed) -> tuple[jax.Array, Caches]:
        """The kernel's own choice."""
        out, caches = self._decode_step(weights, caches, fed)
        return out.tokens[: self.rows, 0], caches

    def _decoded(self, weights: Any, caches: Caches, fed: Fed) -> tuple[jax.Array, Caches]:
        out, caches = self._decode_step(weights, caches, fed)
        return self._gathered(out.logits[: self.rows]), caches

    def _decode_step(
        self, weights: KernelWeights, caches: Caches, fed: Fed
    ) -> tuple[StepOutputs, Caches]:
        """A step of one token per row, and the commit of the active rows."""
        plan = StepPlan(self.model, Block(self.rows, 1))
        # Rows that are not active may hold anything. They cost their state and one tile of keys.
        where = Where(jnp.arange(self.rows), jnp.where(fed.active, fed.positions, 0))
        tokens = jnp.where(fed.active, fed.tokens, 0)
        out = self._step(plan, weights, caches, tokens, where)
        records = KernelRecords(out.gdn, out.gqa)
        counts = fed.active.astype(jnp.int32)
        return out, call_commit(plan, caches, records, where, counts, self.interpret)

    @cached_property
    def verify(self) -> Callable[..., tuple[jax.Array, jax.Array, Caches, VerifyRecords]]:
        """As the XLA program; the caches are only read."""

        def verify(weights: KernelWeights, caches: Caches, *given: Any) -> Any:
            logits, features, records = self.verify_step(weights, caches, *given)
            return logits, features, caches, records

        return verify

    @cached_property
    def verify_step(self) -> Callable[..., tuple[jax.Array, jax.Array, VerifyRecords]]:
        """``(weights, caches, rows [S], tokens [S, T], positions [S])``."""

        def body(
            weights: KernelWeights,
            caches: Caches,
            rows: jax.Array,
            tokens: jax.Array,
            first: jax.Array,
        ) -> tuple[jax.Array, jax.Array, VerifyRecords]:
            block = Block(*tokens.shape)
            where = Where(rows, first)
            out = self._step(StepPlan(self.model, block), weights, caches, tokens.ravel(), where)
            logits = self._gathered(out.logits[: block.rows])
            features = jnp.moveaxis(out.features[: len(self.feature_layers)], 0, 1)[: block.rows]
            return (
                logits.reshape(*tokens.shape, -1),
                features.reshape(*tokens.shape, *features.shape[1:]),
                VerifyRecords(KernelRecords(out.gdn, out.gqa), first, block.tokens),
            )

        specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE)
        return self._compile(body, specs, (WHOLE, WHOLE, SPLIT), donate=())

    @cached_property
    def commit(self) -> Callable[..., tuple[Caches]]:
        """``(caches, records, rows [S], accepted [S])``."""

        def body(
            caches: Caches, left: VerifyRecords, rows: jax.Array, accepted: jax.Array
        ) -> tuple[Caches]:
            plan = StepPlan(self.model, Block(rows.shape[0], left.tokens))
            where = Where(rows, left.positions)
            return (call_commit(plan, caches, left.records, where, accepted, self.interpret),)

        return self._compile(body, (SPLIT, SPLIT, WHOLE, WHOLE), (SPLIT,), donate=(0,))
