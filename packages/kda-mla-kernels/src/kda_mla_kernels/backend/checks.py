"""What a call of the model protocol must satisfy, checked on the host before anything runs.

What decode and commit get from the device passes unseen, so that steps can follow each other
without waiting for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from kda_mla_kernels.backend.options import MAX_CHUNK
from kda_mla_kernels.backend.programs import Programs
from kda_mla_kernels.backend.values import as_i32
from kda_mla_kernels.model import ModelInfo
from kda_mla_kernels.sampling import Sampling

__all__ = ["Checks"]


@dataclass(frozen=True)
class Checks:
    """The checks of one model. Each raises ValueError with one sentence."""

    info: ModelInfo
    programs: Programs

    def settled(self, state: Any) -> None:
        if state.pending is not None:
            raise ValueError("the state holds a verified block; call commit first")
        self.usable(state)

    def usable(self, state: Any) -> None:
        if state.caches.delta.is_deleted():
            raise ValueError("this state was consumed by an earlier call; use what that returned")
        programs, expected_caches = self.programs, self.programs.rank_caches
        expected = (programs.mesh.size, programs.rows, expected_caches.slots)
        ranks, _, rows = state.caches.delta.shape[:3]
        found = (ranks, rows, state.caches.slots)
        if found != expected:
            raise ValueError(
                f"this state has ranks, rows and slots {found}; the model has {expected}"
            )
        if not _alike(state.caches, expected_caches):
            raise ValueError("this state is of a model that was loaded with other options")

    def snapshot(self, state: Any, snap: Any) -> None:
        caches = state.caches
        fits = _alike(snap, caches) and snap.slots <= caches.slots
        if fits:
            axes = jax.tree.leaves(caches.position_axes())
            pairs = zip(jax.tree.leaves(snap), jax.tree.leaves(caches), axes, strict=True)
            fits = all(_is_row_of(taken, part, axis) for taken, part, axis in pairs)
        if not fits:
            raise ValueError(
                "restore takes what snapshot returned, of a model with the same ranks and options"
                f" and at least as long a context as was taken (here {self.info.max_context})"
            )

    def length(self, length: int) -> None:
        whole = isinstance(length, int | np.integer) and not isinstance(length, bool)
        if not whole or not 0 <= length <= self.info.max_context:
            raise ValueError(f"length {length} lies outside 0..{self.info.max_context}")

    def steps(self, steps: int) -> None:
        if not isinstance(steps, int | np.integer) or steps < 1:
            raise ValueError(f"steps {steps!r} must be a whole number of at least 1")

    def sampling(self, sampling: Sampling | None) -> None:
        rows = self.info.max_rows
        if sampling is not None and np.shape(sampling.temperature) != (rows,):
            raise ValueError(
                f"sampling holds {np.shape(sampling.temperature)} parameters; it must hold {rows},"
                " one per row"
            )

    def row(self, row: int) -> None:
        if not isinstance(row, int | np.integer) or not 0 <= row < self.info.max_rows:
            raise ValueError(f"row {row} lies outside 0..{self.info.max_rows - 1}")

    def token_ids(self, ids: np.ndarray) -> None:
        wrong = ids[(ids < 0) | (ids >= self.info.vocab_size)]
        if wrong.size:
            raise ValueError(f"token id {wrong[0]} lies outside 0..{self.info.vocab_size - 1}")

    def chunk(self, ids: np.ndarray, start: int) -> None:
        if ids.ndim != 1 or not 1 <= ids.size <= MAX_CHUNK:
            raise ValueError(
                f"a chunk holds 1..{MAX_CHUNK} tokens in one list, not shape {ids.shape}"
            )
        self.token_ids(ids)
        if not isinstance(start, int | np.integer):
            raise ValueError(f"start {start!r} must be an integer")
        if start < 0 or start + ids.size > self.info.max_context:
            raise ValueError(
                f"tokens {start}..{start + ids.size - 1} do not fit a context of"
                f" {self.info.max_context}"
            )

    def step(self, tokens: Any, positions: Any, live: np.ndarray, steps: int = 1) -> None:
        rows = self.info.max_rows
        for name, values in (("tokens", tokens), ("positions", positions), ("active", live)):
            if np.shape(values) != (rows,):
                raise ValueError(f"{name} must have {rows} entries, one per row")
        if not isinstance(tokens, jax.Array):
            self.token_ids(as_i32(tokens, "tokens")[live])
        if not isinstance(positions, jax.Array):
            self.positions(as_i32(positions, "positions")[live], steps)

    def positions(self, first: np.ndarray, tokens: int) -> None:
        wrong = first[(first < 0) | (first + tokens > self.info.max_context)]
        if wrong.size:
            last = wrong[0] if wrong[0] < 0 else wrong[0] + tokens - 1
            raise ValueError(f"position {last} lies outside a context of {self.info.max_context}")

    def counts(self, accepted: Any, sequences: int, tokens: int) -> None:
        if np.shape(accepted) != (sequences,):
            raise ValueError(f"accepted {accepted} must hold {sequences} counts in 0..{tokens}")
        if isinstance(accepted, jax.Array):
            return
        counts = as_i32(accepted, "accepted")
        if (counts < 0).any() or (counts > tokens).any():
            raise ValueError(
                f"accepted {counts.tolist()} must hold {sequences} counts in 0..{tokens}"
            )

    def block(self, rows: np.ndarray, ids: np.ndarray, first: np.ndarray) -> None:
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
            self.row(int(row))
        self.token_ids(ids)
        self.positions(first, ids.shape[1])


def _alike(caches: Any, other: Any) -> bool:
    """Whether both are of one kind and dtype, with rows' positions held in the same way."""
    kept: Any = jax.tree.structure(caches)
    if kept != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(caches), jax.tree.leaves(other), strict=True)
    return all(one.dtype == another.dtype for one, another in pairs)


def _is_row_of(taken: jax.Array, part: jax.Array, axis: int) -> bool:
    """Whether a snapshot's array fits one row of a cache, up to the number of positions."""
    expected = [*part.shape[:2], *part.shape[3:]]
    found = list(taken.shape)
    if axis and len(found) == len(expected):
        expected[axis] = found[axis]
    return found == expected
