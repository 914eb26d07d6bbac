"""The best tokens of a shard of the vocabulary, inside a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["Candidates", "best_of_shard", "candidate_shapes", "candidates_of_shard"]

CHUNK = 8192
"""Columns that are compared at a time: what a step keeps in registers, not in VMEM."""
LANES = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Candidates:
    """The largest logits of each row, falling; of equal ones the lowest id comes first."""

    values: Any
    """f32 [P, 128], minus infinity behind the last"""
    ids: Any
    """i32 [P, 128]"""


def candidate_shapes(rows: int) -> Candidates:
    """The entry of ``out_shape`` for P rows."""
    return Candidates(
        jax.ShapeDtypeStruct((rows, LANES), jnp.float32),
        jax.ShapeDtypeStruct((rows, LANES), jnp.int32),
    )


def best_of_shard(logits: Any, first: Any, count: Any) -> tuple[jax.Array, jax.Array]:
    """The largest logit of each row and its id; of equal logits the lowest id.

    Args:
        logits: f32 [P, N] of consecutive ids, a reference or an array. A NaN counts as minus
            infinity.
        first: i32, id of column 0.
        count: i32, how many of the columns are ids; the rest is padding.

    Returns:
        f32 [P, 1] values and i32 [P, 1] ids; minus infinity and ``first`` if no column counts.
    """
    top, column = _best(logits, count, None)
    return top, first + column.astype(jnp.int32)


def candidates_of_shard(logits: Any, first: Any, count: Any, wanted: int) -> Candidates:
    """The ``wanted`` largest logits of each row and their ids.

    The logits stay as they are: each turn looks for the best of those that come after the last.

    Args:
        wanted: 1 to 128; the others as for :func:`best_of_shard`.

    Raises:
        ValueError: more are wanted than there are lanes, or none.
    """
    if not 1 <= wanted <= LANES:
        raise ValueError(f"{wanted} candidates do not lie in 1..{LANES}")
    rows = logits.shape[0]
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)

    def turn(place: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values, columns, *last = found
        value, column = _best(logits, count, tuple(last))
        here = lane == place
        return jnp.where(here, value, values), jnp.where(here, column, columns), value, column

    def start(value: float, width: int) -> jax.Array:
        return jnp.full((rows, width), value, jnp.float32)

    before_all = (start(jnp.inf, 1), start(-1.0, 1))
    found = (start(-jnp.inf, LANES), start(0.0, LANES), *before_all)
    values, columns, *_ = lax.fori_loop(0, wanted, turn, found)
    return Candidates(values, first + columns.astype(jnp.int32))


def _best(
    logits: Any, count: Any, after: tuple[jax.Array, ...] | None
) -> tuple[jax.Array, jax.Array]:
    """Value and column, f32 [P, 1], of each row's best logit.

    Columns are below 2^24, so f32 holds them; the smallest of f32 values is one instruction.

    Args:
        after: value and column of the one that it follows; None asks for the first.
    """
    rows, columns = logits.shape
    top = jnp.full((rows, 1), -jnp.inf, jnp.float32)
    at = jnp.zeros((rows, 1), jnp.float32)
    for start in range(0, columns, CHUNK):
        part = logits[:, start : min(start + CHUNK, columns)]
        number = lax.broadcasted_iota(jnp.int32, part.shape, 1) + start
        wide = number.astype(jnp.float32)
        seen = (number < count) & (part == part)
        if after is not None:
            seen &= (part < after[0]) | ((part == after[0]) & (wide > after[1]))
        kept = jnp.where(seen, part, -jnp.inf)
        value = jnp.max(kept, axis=1, keepdims=True)
        column = jnp.min(jnp.where(kept == value, wide, jnp.inf), axis=1, keepdims=True)
        better = value > top
        top, at = jnp.where(better, value, top), jnp.where(better, column, at)
    return top, at
