"""The compiled programs of a model whose steps run in one kernel.

Decode is a step over R sequences of one token and a commit; verify is a step over S sequences of
T tokens, and its commit comes when the caller knows how many were accepted. Prefill stays the XLA
program, over the same weights and the same caches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from tpu_collectives.interpreter import quicken_interpreter

from kda_mla_kernels.backend.options import LoadOptions
from kda_mla_kernels.backend.programs import Fed, Programs
from kda_mla_kernels.backend.ranks import SPLIT, WHOLE
from kda_mla_kernels.backend.step_plan import CANDIDATES
from kda_mla_kernels.backend.vocabulary import gather_candidates
from kda_mla_kernels.block import Block, Where
from kda_mla_kernels.head import Candidates
from kda_mla_kernels.sampling import Sampling, decided_by, sample_candidates

__all__ = ["KernelPrograms", "StepResult", "VerifyRecords", "interpreter_for"]


def interpreter_for(mesh: Mesh) -> Any:
    """How the kernels run on these devices: compiled on TPUs, interpreted elsewhere.

    One rank alone exchanges nothing, so Pallas' own interpreter can run it, which is several times
    faster than the one that simulates remote copies.
    """
    if mesh.devices.flat[0].platform == "tpu":
        return False
    if mesh.size == 1:
        return True
    quicken_interpreter()
    return pltpu.InterpretParams()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VerifyRecords:
    """What a verify step leaves to commit."""

    records: Any
    """the kernel's"""
    positions: jax.Array
    """i32 [ranks, S] of each sequence's first token"""
    tokens: int = field(metadata={"static": True})
    """T"""


class StepResult(Protocol):
    """What a step kernel returns on one rank; P padded rows."""

    @property
    def tokens(self) -> jax.Array:
        """i32 [P, 1], the best token of the whole vocabulary."""
        ...

    @property
    def logits(self) -> jax.Array:
        """f32 [P, columns of the rank's head]."""
        ...

    @property
    def candidates(self) -> Candidates | None:
        """This rank's largest logits, if they were asked for."""
        ...

    @property
    def features(self) -> jax.Array:
        """[F or more, P, D]."""
        ...

    @property
    def records(self) -> Any:
        """What the commit applies."""
        ...


class KernelPrograms(Programs):
    """The programs, given the step and the commit; stands before the XLA programs of a model."""

    @classmethod
    def of(cls, options: LoadOptions, mesh: Mesh, **model: Any) -> Self:
        """See the base class; how kernels run follows from the devices."""
        return super().of(options, mesh, interpret=interpreter_for(mesh), **model)

    @abstractmethod
    def plan(self, block: Block, candidates: int = 0) -> Any:
        """The model's :class:`~.step_plan.StepPlan`."""

    @abstractmethod
    def run_step(
        self, plan: Any, weights: Any, caches: Any, tokens: jax.Array, where: Where
    ) -> StepResult:
        """The step kernel on this rank. Args: tokens i32 [M]; caches are only read."""

    @abstractmethod
    def run_commit(
        self, plan: Any, caches: Any, records: Any, where: Where, accepted: jax.Array
    ) -> Any:
        """The commit kernel on this rank, in place: the caches. Args: accepted i32 [S]."""

    @abstractmethod
    def gathered(self, logits: jax.Array) -> jax.Array:
        """Columns of the rank's head, padding included -> f32 [M, V] of all."""

    def choose(
        self,
        weights: Any,
        caches: Any,
        fed: Fed,
        sampling: Sampling | None,
        with_logits: bool,
    ) -> tuple[jax.Array, jax.Array | None, Any]:
        """Where no logits are wanted and few decide, the kernel's best or its candidates do."""
        if with_logits or not (sampling is None or decided_by(sampling, CANDIDATES)):
            return super().choose(weights, caches, fed, sampling, with_logits)
        if sampling is None or decided_by(sampling, 1):
            chosen, caches = self.greedy_step(weights, caches, *fed)
        else:
            chosen, caches = self.sampled_step(weights, caches, *fed, sampling)
        return chosen, None, caches

    @cached_property
    def sampled_step(self) -> Callable[..., tuple[jax.Array, Any]]:
        """``(weights, caches, tokens [R], positions [R], active [R], sampling)``.

        Neither gathers nor sorts the vocabulary. Returns tokens i32 [R] and the moved caches.
        """

        def body(
            weights: Any, caches: Any, tokens: Any, positions: Any, active: Any, sampling: Sampling
        ) -> tuple[jax.Array, Any]:
            fed = Fed(tokens, positions, active)
            out, caches = self._decode_step(weights, caches, fed, CANDIDATES)
            assert out.candidates is not None
            values, ids = gather_candidates(out.candidates, self.rows, CANDIDATES)
            chosen = sample_candidates(values, ids, sampling, positions + 1)
            return jnp.where(active, chosen, -1), caches

        specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE, WHOLE)
        return self._compile(body, specs, (WHOLE, SPLIT), donate=(1,))

    def _greedy(self, weights: Any, caches: Any, fed: Fed) -> tuple[jax.Array, Any]:
        """The kernel's own choice."""
        out, caches = self._decode_step(weights, caches, fed)
        return out.tokens[: self.rows, 0], caches

    def _decoded(self, weights: Any, caches: Any, fed: Fed) -> tuple[jax.Array, Any]:
        out, caches = self._decode_step(weights, caches, fed)
        return self.gathered(out.logits[: self.rows]), caches

    def _decode_step(
        self, weights: Any, caches: Any, fed: Fed, candidates: int = 0
    ) -> tuple[StepResult, Any]:
        """A step of one token per row, and the commit of the active rows."""
        plan = self.plan(Block(self.rows, 1), candidates)
        # Rows that are not active may hold anything. They cost their state and one tile of keys.
        where = Where(jnp.arange(self.rows), jnp.where(fed.active, fed.positions, 0))
        tokens = jnp.where(fed.active, fed.tokens, 0)
        out = self.run_step(plan, weights, caches, tokens, where)
        counts = fed.active.astype(jnp.int32)
        return out, self.run_commit(plan, caches, out.records, where, counts)

    @cached_property
    def verify(self) -> Callable[..., tuple[jax.Array, jax.Array, Any, VerifyRecords]]:
        """As the XLA program; the caches are only read."""

        def verify(weights: Any, caches: Any, *given: Any) -> Any:
            logits, features, records = self.verify_step(weights, caches, *given)
            return logits, features, caches, records

        return verify

    @cached_property
    def verify_step(self) -> Callable[..., tuple[jax.Array, jax.Array, VerifyRecords]]:
        """``(weights, caches, rows [S], tokens [S, T], positions [S])``."""

        def body(
            weights: Any, caches: Any, rows: jax.Array, tokens: jax.Array, first: jax.Array
        ) -> tuple[jax.Array, jax.Array, VerifyRecords]:
            block = Block(*tokens.shape)
            plan, where = self.plan(block), Where(rows, first)
            out = self.run_step(plan, weights, caches, tokens.ravel(), where)
            logits = self.gathered(out.logits[: block.rows])
            features = jnp.moveaxis(out.features[: len(self.feature_layers)], 0, 1)[: block.rows]
            return (
                logits.reshape(*tokens.shape, -1),
                features.reshape(*tokens.shape, *features.shape[1:]),
                VerifyRecords(out.records, first, block.tokens),
            )

        specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE)
        return self._compile(body, specs, (WHOLE, WHOLE, SPLIT), donate=())

    @cached_property
    def commit(self) -> Callable[..., tuple[Any]]:
        """``(caches, records, rows [S], accepted [S])``."""

        def body(
            caches: Any, left: VerifyRecords, rows: jax.Array, accepted: jax.Array
        ) -> tuple[Any]:
            plan = self.plan(Block(rows.shape[0], left.tokens))
            where = Where(rows, left.positions)
            return (self.run_commit(plan, caches, left.records, where, accepted),)

        return self._compile(body, (SPLIT, SPLIT, WHOLE, WHOLE), (SPLIT,), donate=(0,))
