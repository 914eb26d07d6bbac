"""The model protocol over compiled programs: checks host values, picks shapes, runs programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kda_mla_kernels.chat import ChatFormat
from kda_mla_kernels.gqa import KEY_BLOCK
from kda_mla_kernels.model import Decoded, GenerationDefaults, ModelInfo, Prefilled, Verified
from kda_mla_kernels.sampling import Sampling
from tokenizers import Tokenizer

from megakernel_qwen.xla.caches import Caches
from megakernel_qwen.xla.programs import Fed, Programs, as_i32
from megakernel_qwen.xla.rows import put_row, reset_row, take_row

__all__ = ["MAX_CHUNK", "QwenModel", "QwenState", "cache_slots"]

MAX_CHUNK = 1024
_CHUNK_SHAPES = (16, 64, 256, MAX_CHUNK)
"""Padded lengths of a prefill chunk: few, since each is compiled once."""


def cache_slots(context: int) -> int:
    """Key and value slots for a context: whole blocks of the attention loop."""
    return -(-context // KEY_BLOCK) * KEY_BLOCK


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QwenState:
    """The state of all rows; ``pending`` is what a verify step left to commit."""

    caches: Caches
    pending: tuple[Any, jax.Array] | None = None
    """replay records, which know their tokens per sequence, and the rows i32 [S] they belong to"""


@dataclass(frozen=True)
class QwenModel:
    """A loaded model (implements :class:`kda_mla_kernels.model.Model`)."""

    info: ModelInfo
    generation: GenerationDefaults
    chat_format: ChatFormat | None
    tokenizer: Tokenizer | None
    weights: Any
    """what the programs read"""
    programs: Programs

    def init_state(self) -> QwenState:
        """All rows empty."""
        return QwenState(self.programs.empty())

    def prefill(
        self,
        state: QwenState,
        row: int,
        tokens: Sequence[int],
        start: int,
        *,
        all_logits: bool = False,
    ) -> Prefilled:
        """See the protocol."""
        ids = as_i32(tokens, "tokens")
        self._check_settled(state)
        self._check_row(row)
        self._check_chunk(ids, start)
        shape = next(size for size in _CHUNK_SHAPES if size >= ids.size)
        padded = min(shape, self.programs.slots)
        program = self.programs.prefill_all if all_logits else self.programs.prefill
        logits, features, caches = program(
            self.weights,
            state.caches,
            as_i32(row),
            np.pad(ids, (0, padded - ids.size)),
            as_i32(start),
            as_i32(ids.size),
        )
        logits = logits[: ids.size] if all_logits else logits[0]
        return Prefilled(logits, features[: ids.size], QwenState(caches))

    def decode(
        self,
        state: QwenState,
        tokens: Sequence[int] | jax.Array,
        positions: Sequence[int] | jax.Array,
        active: Sequence[bool],
        sampling: Sampling | None = None,
        *,
        with_logits: bool = False,
    ) -> Decoded:
        """See the protocol."""
        self._check_settled(state)
        live = np.asarray(active, bool)
        self._check_step(tokens, positions, live)
        self._check_sampling(sampling)
        fed = Fed(_ids(tokens), _ids(positions), live)
        chosen, logits, caches = self.programs.choose(
            self.weights, state.caches, fed, sampling, with_logits
        )
        return Decoded(chosen, logits if with_logits else None, QwenState(caches))

    def decode_steps(
        self,
        state: QwenState,
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
        self._check_settled(state)
        live = np.asarray(active, bool)
        if not isinstance(steps, int | np.integer) or steps < 1:
            raise ValueError(f"steps {steps!r} must be a whole number of at least 1")
        self._check_step(tokens, positions, live, int(steps))
        program = self.programs.greedy_steps(int(steps))
        chosen, caches = program(self.weights, state.caches, _ids(tokens), _ids(positions), live)
        return Decoded(chosen, None, QwenState(caches))

    def verify(
        self,
        state: QwenState,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        positions: Sequence[int],
    ) -> Verified:
        """See the protocol."""
        self._check_settled(state)
        ids, first = as_i32(tokens, "tokens"), as_i32(positions, "positions")
        where = as_i32(rows, "rows")
        self._check_block(where, ids, first)
        logits, features, caches, records = self.programs.verify(
            self.weights, state.caches, where, ids, first
        )
        return Verified(logits, features, QwenState(caches, (records, jnp.asarray(where))))

    def commit(self, state: QwenState, accepted: Sequence[int] | jax.Array) -> QwenState:
        """See the protocol.

        Raises:
            ValueError: nothing was verified, or a count outside 0..T.
        """
        if state.pending is None:
            raise ValueError("nothing to commit: call verify first")
        records, rows = state.pending
        self._check_usable(state)
        self._check_counts(accepted, rows.size, records.tokens)
        (caches,) = self.programs.commit(state.caches, records, rows, _ids(accepted))
        return QwenState(caches)

    def reset(self, state: QwenState, row: int) -> QwenState:
        """See the protocol."""
        self._check_settled(state)
        self._check_row(row)
        return QwenState(reset_row(state.caches, as_i32(row)))

    def snapshot(self, state: QwenState, row: int, length: int) -> Caches:
        """See the protocol. Keys and values are copied in whole blocks."""
        self._check_settled(state)
        self._check_row(row)
        if not 0 <= length <= self.info.max_context:
            raise ValueError(f"length {length} lies outside 0..{self.info.max_context}")
        return take_row(state.caches, as_i32(row), cache_slots(length))

    def restore(self, state: QwenState, row: int, snap: Caches) -> QwenState:
        """See the protocol."""
        self._check_settled(state)
        self._check_row(row)
        self._check_snapshot(state, snap)
        return replace(state, caches=put_row(state.caches, as_i32(row), snap))

    # Checks of host values. What decode and commit get from the device passes unseen, so that
    # steps can follow each other without waiting for it.

    def _check_settled(self, state: QwenState) -> None:
        if state.pending is not None:
            raise ValueError("the state holds a verified block; call commit first")
        self._check_usable(state)

    def _check_usable(self, state: QwenState) -> None:
        if state.caches.delta.is_deleted():
            raise ValueError("this state was consumed by an earlier call; use what that returned")
        programs = self.programs
        expected = (programs.mesh.size, programs.rows, programs.slots)
        found = (state.caches.keys.shape[0], state.caches.keys.shape[2], state.caches.slots)
        if found != expected:
            raise ValueError(
                f"this state has ranks, rows and slots {found}; the model has {expected}"
            )

    def _check_snapshot(self, state: QwenState, snap: Any) -> None:
        def row_shape(part: jax.Array) -> tuple[int, ...]:
            return (*part.shape[:2], *part.shape[3:])

        fits = isinstance(snap, Caches) and (
            snap.delta.shape == row_shape(state.caches.delta)
            and snap.keys.shape[:-1] == row_shape(state.caches.keys)[:-1]
            and snap.slots <= self.programs.slots
        )
        if not fits:
            raise ValueError(
                "restore takes what snapshot returned, of a model with the same ranks and at"
                f" least as long a context as was taken (here {self.info.max_context})"
            )

    def _check_sampling(self, sampling: Sampling | None) -> None:
        rows = self.info.max_rows
        if sampling is not None and np.shape(sampling.temperature) != (rows,):
            raise ValueError(
                f"sampling holds {np.shape(sampling.temperature)} parameters; it must hold {rows},"
                " one per row"
            )

    def _check_row(self, row: int) -> None:
        if not isinstance(row, int | np.integer) or not 0 <= row < self.info.max_rows:
            raise ValueError(f"row {row} lies outside 0..{self.info.max_rows - 1}")

    def _check_ids(self, ids: np.ndarray) -> None:
        wrong = ids[(ids < 0) | (ids >= self.info.vocab_size)]
        if wrong.size:
            raise ValueError(f"token id {wrong[0]} lies outside 0..{self.info.vocab_size - 1}")

    def _check_chunk(self, ids: np.ndarray, start: int) -> None:
        if ids.ndim != 1 or not 1 <= ids.size <= MAX_CHUNK:
            raise ValueError(
                f"a chunk holds 1..{MAX_CHUNK} tokens in one list, not shape {ids.shape}"
            )
        self._check_ids(ids)
        if not isinstance(start, int | np.integer):
            raise ValueError(f"start {start!r} must be an integer")
        if start < 0 or start + ids.size > self.info.max_context:
            raise ValueError(
                f"tokens {start}..{start + ids.size - 1} do not fit a context of"
                f" {self.info.max_context}"
            )

    def _check_step(self, tokens: Any, positions: Any, live: np.ndarray, steps: int = 1) -> None:
        rows = self.info.max_rows
        for name, values in (("tokens", tokens), ("positions", positions), ("active", live)):
            if np.shape(values) != (rows,):
                raise ValueError(f"{name} must have {rows} entries, one per row")
        if not isinstance(tokens, jax.Array):
            self._check_ids(as_i32(tokens, "tokens")[live])
        if not isinstance(positions, jax.Array):
            self._check_positions(as_i32(positions, "positions")[live], steps)

    def _check_positions(self, first: np.ndarray, tokens: int) -> None:
        wrong = first[(first < 0) | (first + tokens > self.info.max_context)]
        if wrong.size:
            last = wrong[0] if wrong[0] < 0 else wrong[0] + tokens - 1
            raise ValueError(f"position {last} lies outside a context of {self.info.max_context}")

    def _check_counts(self, accepted: Any, sequences: int, tokens: int) -> None:
        if np.shape(accepted) != (sequences,):
            raise ValueError(f"accepted {accepted} must hold {sequences} counts in 0..{tokens}")
        if isinstance(accepted, jax.Array):
            return
        counts = as_i32(accepted, "accepted")
        if (counts < 0).any() or (counts > tokens).any():
            raise ValueError(
                f"accepted {counts.tolist()} must hold {sequences} counts in 0..{tokens}"
            )

    def _check_block(self, rows: np.ndarray, ids: np.ndarray, first: np.ndarray) -> None:
        if (
            ids.ndim != 2
            or ids.size == 0
            or rows.shape != ids.shape[:1]
            or first.shape != rows.shape
        ):
            raise ValueError(
                "verify takes rows [S], tokens [S, T] and positions [S],"
                f" not {rows.shape}, {ids.shape} and {first.shape}"
            )
        if ids.size > self.info.max_rows:
            raise ValueError(
                f"{ids.shape[0]} sequences of {ids.shape[1]} tokens exceed"
                f" {self.info.max_rows} rows"
            )
        if len(set(rows.tolist())) < rows.size:
            raise ValueError(f"rows {rows.tolist()} must be distinct")
        for row in rows:
            self._check_row(int(row))
        self._check_ids(ids)
        self._check_positions(first, ids.shape[1])


def _ids(values: Any) -> jax.Array | np.ndarray:
    """Passes device values through and makes host values i32."""
    return values if isinstance(values, jax.Array) else as_i32(values)
