"""The model protocol over compiled programs: checks host values, picks shapes, runs programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_mla_kernels.backend.checks import Checks
from kda_mla_kernels.backend.memory import DeltaCaches
from kda_mla_kernels.backend.options import MAX_CHUNK, cache_slots
from kda_mla_kernels.backend.programs import Fed, Programs
from kda_mla_kernels.backend.rows import put_row, reset_row, take_row
from kda_mla_kernels.backend.values import as_i32, ids
from kda_mla_kernels.chat import ChatFormat
from kda_mla_kernels.model import Decoded, GenerationDefaults, ModelInfo, Prefilled, Verified
from kda_mla_kernels.sampling import Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["BackendModel", "BackendState"]

_CHUNK_SHAPES = (16, 64, 256, MAX_CHUNK)
"""Padded lengths of a prefill chunk: few, since each is compiled once."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BackendState:
    """The state of all rows; ``pending`` is what a verify step left to commit."""

    caches: DeltaCaches
    pending: tuple[Any, jax.Array] | None = None
    """replay records, which know their tokens per sequence, and the rows i32 [S] they belong to"""


@dataclass(frozen=True)
class BackendModel:
    """A loaded model (implements :class:`kda_mla_kernels.model.Model`)."""

    info: ModelInfo
    generation: GenerationDefaults
    chat_format: ChatFormat | None
    tokenizer: Tokenizer | None
    weights: Any
    """what the programs read"""
    programs: Programs

    @property
    def _checks(self) -> Checks:
        return Checks(self.info, self.programs)

    def init_state(self) -> BackendState:
        """All rows empty."""
        return BackendState(self.programs.empty())

    def prefill(
        self,
        state: BackendState,
        row: int,
        tokens: Sequence[int],
        start: int,
        *,
        all_logits: bool = False,
    ) -> Prefilled:
        """See the protocol."""
        fed = as_i32(tokens, "tokens")
        self._checks.settled(state)
        self._checks.row(row)
        self._checks.chunk(fed, start)
        shape = next(size for size in _CHUNK_SHAPES if size >= fed.size)
        padded = min(shape, self.programs.slots)
        program = self.programs.prefill_all if all_logits else self.programs.prefill
        logits, features, caches = program(
            self.weights,
            state.caches,
            as_i32(row),
            np.pad(fed, (0, padded - fed.size)),
            as_i32(start),
            as_i32(fed.size),
        )
        logits = logits[: fed.size] if all_logits else logits[0]
        return Prefilled(logits, features[: fed.size], BackendState(caches))

    def decode(
        self,
        state: BackendState,
        tokens: Sequence[int] | jax.Array,
        positions: Sequence[int] | jax.Array,
        active: Sequence[bool],
        sampling: Sampling | None = None,
        *,
        with_logits: bool = False,
    ) -> Decoded:
        """See the protocol."""
        self._checks.settled(state)
        live = np.asarray(active, bool)
        self._checks.step(tokens, positions, live)
        self._checks.sampling(sampling)
        fed = Fed(ids(tokens), ids(positions), live)
        chosen, logits, caches = self.programs.choose(
            self.weights, state.caches, fed, sampling, with_logits
        )
        return Decoded(chosen, logits if with_logits else None, BackendState(caches))

    def decode_steps(
        self,
        state: BackendState,
        tokens: Sequence[int] | jax.Array,
        positions: Sequence[int] | jax.Array,
        active: Sequence[bool],
        steps: int,
    ) -> Decoded:
        """Greedy steps that follow each other on the device, without a word to the host.

        Args:
            tokens, positions, active: as for :meth:`decode`, of the first step.
            steps: how many; each number is compiled once.

        Returns:
            as :meth:`decode`, but tokens i32 [steps, R].

        Raises:
            ValueError: as :meth:`decode`; fewer than one step, or steps beyond the context.
        """
        self._checks.settled(state)
        live = np.asarray(active, bool)
        self._checks.steps(steps)
        self._checks.step(tokens, positions, live, int(steps))
        program = self.programs.greedy_steps(int(steps))
        chosen, caches = program(self.weights, state.caches, ids(tokens), ids(positions), live)
        return Decoded(chosen, None, BackendState(caches))

    def verify(
        self,
        state: BackendState,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        positions: Sequence[int],
    ) -> Verified:
        """See the protocol."""
        self._checks.settled(state)
        block, first = as_i32(tokens, "tokens"), as_i32(positions, "positions")
        where = as_i32(rows, "rows")
        self._checks.block(where, block, first)
        logits, features, caches, records = self.programs.verify(
            self.weights, state.caches, where, block, first
        )
        return Verified(logits, features, BackendState(caches, (records, jnp.asarray(where))))

    def commit(self, state: BackendState, accepted: Sequence[int] | jax.Array) -> BackendState:
        """See the protocol.

        Raises:
            ValueError: nothing was verified, or a count outside 0..T.
        """
        if state.pending is None:
            raise ValueError("nothing to commit: call verify first")
        records, rows = state.pending
        self._checks.usable(state)
        self._checks.counts(accepted, rows.size, records.tokens)
        (caches,) = self.programs.commit(state.caches, records, rows, ids(accepted))
        return BackendState(caches)

    def reset(self, state: BackendState, row: int) -> BackendState:
        """See the protocol."""
        self._checks.settled(state)
        self._checks.row(row)
        return BackendState(reset_row(state.caches, as_i32(row)))

    def snapshot(self, state: BackendState, row: int, length: int) -> DeltaCaches:
        """See the protocol. Keys and values are copied in whole blocks."""
        self._checks.settled(state)
        self._checks.row(row)
        self._checks.length(length)
        slots = self.programs.rank_slots(cache_slots(length))
        return take_row(state.caches, as_i32(row), slots)

    def restore(self, state: BackendState, row: int, snap: DeltaCaches) -> BackendState:
        """See the protocol."""
        self._checks.settled(state)
        self._checks.row(row)
        self._checks.snapshot(state, snap)
        return replace(state, caches=put_row(state.caches, as_i32(row), snap))
