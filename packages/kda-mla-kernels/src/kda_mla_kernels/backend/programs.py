"""The compiled programs of a model: decode, verify, commit and prefill.

Each is a ``shard_map`` over the ranks, jitted with donated caches. Shapes that vary (sequences and
tokens of a verify, the padded length of a chunk) are compiled once each, on first use. A model
package says what happens to the tokens of a :class:`Batch` on one rank; what surrounds that is
here: choosing tokens, loops on the device, positions, padding, the rank axis.

Letters: R rows of the state, S sequences, T tokens of each, N tokens of a chunk, M flat rows, F
feature layers, D hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from kda_mla_kernels.backend.batch import Batch
from kda_mla_kernels.backend.memory import (
    ChunkRule,
    DeltaCaches,
    Memory,
    chunk_memory,
    commit_records,
    decode_memory,
    verify_memory,
)
from kda_mla_kernels.backend.options import LoadOptions
from kda_mla_kernels.backend.ranks import SPLIT, WHOLE
from kda_mla_kernels.sampling import Sampling, sample

__all__ = ["Fed", "Passed", "Programs"]


class Fed(NamedTuple):
    """What a decode step gives each row: arrays of the host or the device, or traced."""

    tokens: Any
    """i32 [R]"""
    positions: Any
    """i32 [R]"""
    active: Any
    """bool [R]"""


class Passed(NamedTuple):
    """What the layers make of a batch."""

    hidden: jax.Array
    """[M, D] what the head reads"""
    features: jax.Array
    """[F, M, D]"""
    caches: Any
    records: Any
    """None unless the memory keeps records"""


@dataclass(frozen=True)
class Programs(ABC):
    """All programs of one model on one mesh; a model package fills in the abstract parts."""

    mesh: Mesh
    rows: int
    """R, rows of the state and flat rows of decode and verify"""
    slots: int
    """positions that a row has room for"""
    feature_layers: tuple[int, ...]

    # Otherwise XLA may keep bf16 intermediates in f32, and the rounding would depend on fusion.
    compiler_options: ClassVar[Mapping[str, Any]] = {"xla_allow_excess_precision": False}

    @classmethod
    def of(cls, options: LoadOptions, mesh: Mesh, **model: Any) -> Self:
        """With the shape that was asked for; ``model`` holds the fields that a package adds."""
        return cls(
            mesh=mesh,
            rows=options.max_rows,
            slots=options.slots,
            feature_layers=options.feature_layers,
            **model,
        )

    # What a model is. All but the first run on one rank, inside of the programs.

    @abstractmethod
    def cache_shapes(self) -> DeltaCaches:
        """Shapes and dtypes of one rank's caches."""

    @property
    @abstractmethod
    def chunk_rule(self) -> ChunkRule:
        """The delta rule over a chunk."""

    @abstractmethod
    def passed(
        self, weights: Any, caches: Any, batch: Batch, memory: Memory, records: Any
    ) -> Passed:
        """Embedding and all layers."""

    @abstractmethod
    def head(self, weights: Any, hidden: jax.Array) -> jax.Array:
        """Final norm and logits of the whole vocabulary, on every rank: [M, D] -> f32 [M, V]."""

    @abstractmethod
    def no_records(self, batch: Batch) -> Any:
        """Replay records that no layer has written yet."""

    @cached_property
    def rank_caches(self) -> DeltaCaches:
        """:meth:`cache_shapes`, for what every call compares with."""
        return self.cache_shapes()

    def rank_slots(self, slots: int) -> int:
        """Slots of a rank's caches, where a row has so many positions; as many, unless a model
        deals positions out to ranks."""
        return slots

    def _compile(
        self,
        body: Callable[..., Any],
        specs: tuple[jax.sharding.PartitionSpec, ...],
        results: Any,
        donate: tuple[int, ...],
    ) -> Callable[..., Any]:
        """Wraps a per-rank function; arguments split over ranks lose their rank axis inside."""

        def per_rank(*args: Any) -> Any:
            local = [
                jax.tree.map(lambda x: x[0], arg) if spec == SPLIT else arg
                for arg, spec in zip(args, specs)
            ]
            outputs = body(*local)
            return tuple(
                jax.tree.map(lambda x: x[None], out) if spec == SPLIT else out
                for out, spec in zip(outputs, results)
            )

        mapped = jax.shard_map(
            per_rank, mesh=self.mesh, in_specs=specs, out_specs=results, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donate, compiler_options=dict(self.compiler_options))

    def empty(self) -> Any:
        """Zeroed caches, split over the ranks."""
        shapes = self.cache_shapes()

        def zeros() -> Any:
            return jax.tree.map(lambda x: jnp.zeros((self.mesh.size, *x.shape), x.dtype), shapes)

        return jax.jit(zeros, out_shardings=NamedSharding(self.mesh, SPLIT))()

    def choose(
        self,
        weights: Any,
        caches: Any,
        fed: Fed,
        sampling: Sampling | None,
        with_logits: bool,
    ) -> tuple[jax.Array, jax.Array | None, Any]:
        """A decode step, greedy without ``sampling``."""
        found = Sampling.greedy(self.rows) if sampling is None else sampling
        chosen, logits, caches = self.decode(weights, caches, *fed, found)
        return chosen, logits, caches

    @cached_property
    def greedy_step(self) -> Callable[..., tuple[jax.Array, Any]]:
        """As :meth:`greedy_steps` for one step: tokens i32 [R]."""

        def body(weights: Any, caches: Any, *given: jax.Array) -> tuple[jax.Array, Any]:
            fed = Fed(*given)
            chosen, caches = self._greedy(weights, caches, fed)
            return jnp.where(fed.active, chosen, -1), caches

        specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE)
        return self._compile(body, specs, (WHOLE, SPLIT), donate=(1,))

    def greedy_steps(self, count: int) -> Callable[..., tuple[jax.Array, Any]]:
        """``(weights, caches, tokens [R], positions [R], active [R])``: tokens i32 [count, R].

        The loop runs on the device; each step feeds what the one before chose.
        """
        if count not in self._greedy_programs:
            self._greedy_programs[count] = self._compile_steps(count)
        return self._greedy_programs[count]

    @cached_property
    def _greedy_programs(self) -> dict[int, Callable[..., tuple[jax.Array, Any]]]:
        return {}

    def _compile_steps(self, count: int) -> Callable[..., tuple[jax.Array, Any]]:
        def body(weights: Any, caches: Any, *given: jax.Array) -> tuple[jax.Array, Any]:
            def step(carry: tuple[Fed, Any], _: None) -> tuple[tuple[Fed, Any], jax.Array]:
                fed, caches = carry
                chosen, caches = self._greedy(weights, caches, fed)
                tokens = jnp.where(fed.active, chosen, fed.tokens)
                following = Fed(tokens, fed.positions + 1, fed.active)
                return (following, caches), jnp.where(fed.active, chosen, -1)

            (_, caches), chosen = lax.scan(step, (Fed(*given), caches), length=count)
            return chosen, caches

        specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE)
        return self._compile(body, specs, (WHOLE, SPLIT), donate=(1,))

    def _greedy(self, weights: Any, caches: Any, fed: Fed) -> tuple[jax.Array, Any]:
        """One step of one token per row on this rank: the best tokens, and the moved state."""
        logits, caches = self._decoded(weights, caches, fed)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), caches

    def _decoded(self, weights: Any, caches: Any, fed: Fed) -> tuple[jax.Array, Any]:
        """One step of one token per row on this rank: f32 logits [R, V], and the moved state."""
        columns = (fed.tokens[:, None], fed.positions[:, None], fed.active[:, None])
        batch = Batch(*columns, rows=None, flat_rows=self.rows, alone=True)
        passed = self.passed(weights, caches, batch, decode_memory, None)
        return self.head(weights, passed.hidden), passed.caches

    @cached_property
    def decode(self) -> Callable[..., tuple[jax.Array, jax.Array, Any]]:
        """``(weights, caches, tokens [R], positions [R], active [R], sampling)``."""

        def body(
            weights: Any,
            caches: Any,
            tokens: jax.Array,
            positions: jax.Array,
            active: jax.Array,
            sampling: Sampling,
        ) -> tuple[jax.Array, jax.Array, Any]:
            logits, caches = self._decoded(weights, caches, Fed(tokens, positions, active))
            chosen = sample(logits, sampling, positions + 1)
            return jnp.where(active, chosen, -1), logits, caches

        specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE, WHOLE)
        return self._compile(body, specs, (WHOLE, WHOLE, SPLIT), donate=(1,))

    @cached_property
    def verify(self) -> Callable[..., tuple[jax.Array, jax.Array, Any, Any]]:
        """``(weights, caches, rows [S], tokens [S, T], positions [S])``."""

        def body(
            weights: Any, caches: Any, rows: jax.Array, tokens: jax.Array, first: jax.Array
        ) -> tuple[jax.Array, jax.Array, Any, Any]:
            positions = first[:, None] + jnp.arange(tokens.shape[1])
            live = jnp.ones(tokens.shape, bool)
            batch = Batch(tokens, positions, live, rows, flat_rows=self.rows, alone=True)
            records = self.no_records(batch)
            passed = self.passed(weights, caches, batch, verify_memory, records)
            logits = batch.grid(self.head(weights, passed.hidden))
            return logits, _features(passed, batch), passed.caches, passed.records

        specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE)
        return self._compile(body, specs, (WHOLE, WHOLE, SPLIT, SPLIT), donate=(1,))

    @cached_property
    def commit(self) -> Callable[..., tuple[Any]]:
        """``(caches, records, rows [S], accepted [S])``."""

        def body(caches: Any, records: Any, rows: jax.Array, accepted: jax.Array) -> tuple[Any]:
            return (commit_records(caches, records, rows, accepted),)

        return self._compile(body, (SPLIT, SPLIT, WHOLE, WHOLE), (SPLIT,), donate=(0,))

    @cached_property
    def prefill(self) -> Callable[..., tuple[jax.Array, jax.Array, Any]]:
        """``(weights, caches, row, tokens [N], start, valid)``: logits of the last valid token."""
        return self._prefill(all_logits=False)

    @cached_property
    def prefill_all(self) -> Callable[..., tuple[jax.Array, jax.Array, Any]]:
        """As :attr:`prefill`, with the logits of every token."""
        return self._prefill(all_logits=True)

    def _prefill(self, all_logits: bool) -> Callable[..., tuple[jax.Array, jax.Array, Any]]:
        def body(
            weights: Any,
            caches: Any,
            row: jax.Array,
            tokens: jax.Array,
            start: jax.Array,
            valid: jax.Array,
        ) -> tuple[jax.Array, jax.Array, Any]:
            live = jnp.arange(tokens.shape[0]) < valid
            # Padding must not stretch the attention loop beyond the last real token.
            positions = start + jnp.minimum(jnp.arange(tokens.shape[0]), valid - 1)
            batch = Batch(
                tokens[None], positions[None], live[None], row[None], flat_rows=tokens.shape[0]
            )
            memory = chunk_memory(self.chunk_rule)
            passed = self.passed(weights, caches, batch, memory, None)
            hidden = passed.hidden
            if not all_logits:
                hidden = lax.dynamic_slice_in_dim(hidden, valid - 1, 1)
            return self.head(weights, hidden), _features(passed, batch)[0], passed.caches

        specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE, WHOLE)
        return self._compile(body, specs, (WHOLE, WHOLE, SPLIT), donate=(1,))


def _features(passed: Passed, batch: Batch) -> jax.Array:
    """[F, M, D] -> [S, T, F, D]."""
    return batch.grid(jnp.moveaxis(passed.features, 0, 1))
