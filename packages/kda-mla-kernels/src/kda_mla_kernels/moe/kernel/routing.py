"""Which experts each row goes to, and all routes sorted by expert, without a branch.

Letters: P padded rows, E experts, k experts per row, N entries (routes, padded).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.block import by_sublanes
from kda_mla_kernels.moe.router import SUM_EPS, RouterRule
from kda_mla_kernels.moe.top_k import ordered_keys

__all__ = [
    "Demand",
    "Entries",
    "chosen_weights",
    "entries_of_one_row",
    "sorted_entries",
    "top_k_by_digits",
    "top_k_by_rank",
]

DIGIT_BITS = 4
"""Bits of the threshold that one round finds: 16 candidates fill the sublanes of two registers."""
LANES = 128
SUBLANES = 8
AT_ONCE = 128
"""Entries of the list that are found together: they fill lanes."""


def top_k_by_digits(values: jax.Array, k: int) -> jax.Array:
    """Which entries are among the k largest of their row; of equal ones those of lowest index.

    As :func:`~kda_mla_kernels.moe.top_k.top_k_mask`, but the k-th largest key is found four bits
    at a time: 8 rounds, each of which compares a row with 16 candidates at once.

    Args:
        values: f32 [P, E] without NaN.

    Returns:
        f32 [P, E], 1 where chosen, else 0.
    """
    keys = ordered_keys(values)
    lowest = jnp.int32(-(2**31))
    digits = lax.broadcasted_iota(jnp.int32, (1, 1 << DIGIT_BITS, 1), 1)

    def refine(step: jax.Array, threshold: jax.Array) -> jax.Array:
        shift = 32 - DIGIT_BITS * (step + 1)
        candidates = threshold | (digits << shift)
        reached = keys[:, None, :] >= (candidates ^ lowest)
        counts = jnp.sum(reached.astype(jnp.float32), axis=-1, keepdims=True)
        enough = (counts >= k) & (digits > 0)
        digit = jnp.sum(enough.astype(jnp.float32), axis=1, keepdims=True)
        return threshold | (digit.astype(jnp.int32) << shift)

    zero = jnp.zeros((len(keys), 1, 1), jnp.int32)  # keys are counted from the lowest
    threshold = lax.fori_loop(0, 32 // DIGIT_BITS, refine, zero)
    limit = threshold[:, 0] ^ lowest
    above = (keys > limit).astype(jnp.float32)
    equal = (keys == limit).astype(jnp.float32)
    room = k - jnp.sum(above, axis=-1, keepdims=True)
    taken = jnp.where(running_counts(equal) <= room, equal, 0.0)
    return above + taken


def top_k_by_rank(values: jax.Array, k: int) -> jax.Array:
    """The same choice for one row, found by comparing each entry with each.

    That is more work and less waiting: digits follow from one another through sums across lanes,
    which as compiled takes twice as long as all comparisons of one row of 896.

    Args:
        values: f32 [1, E] without NaN.

    Returns:
        f32 [1, E], 1 where chosen, else 0.
    """
    keys, experts = ordered_keys(values), values.shape[1]
    if experts % LANES:  # behind all others, whatever they are
        last = jnp.full((1, LANES - experts % LANES), -(2**31), jnp.int32)
        keys = jnp.concatenate([keys, last], axis=1)
    columns = jnp.split(keys, keys.shape[1] // LANES, axis=1)
    ahead = [jnp.zeros((SUBLANES, LANES), jnp.float32) for _ in columns]
    for number, column in enumerate(columns):
        others = jnp.broadcast_to(column.T, (LANES, LANES))
        for place, own in enumerate(columns):
            ahead[place] = ahead[place] + _better(others, number, own, place)
    ranks = [jnp.sum(counts, axis=0, keepdims=True) for counts in ahead]
    chosen = [(rank < k).astype(jnp.float32) for rank in ranks]
    return jnp.concatenate(chosen, axis=1)[:, :experts]


def _better(others: jax.Array, number: int, column: jax.Array, place: int) -> jax.Array:
    """How many of some keys come before each of a column's.

    Args:
        others: i32 [128, 128], a key in each row: those of column ``number``.
        column: i32 [1, 128], those of column ``place``.

    Returns:
        f32 [8, 128], to be summed.
    """
    if number == place:
        first, second = (lax.broadcasted_iota(jnp.int32, others.shape, axis) for axis in range(2))
        before = (others > column) | ((others == column) & (first < second))
    else:
        before = others > column if number > place else others >= column
    return jnp.sum(before.astype(jnp.float32).reshape(-1, SUBLANES, LANES), axis=0)


def running_counts(marks: jax.Array) -> jax.Array:
    """Inclusive sums along each row of whole numbers up to 256: f32 [P, E] -> f32 [P, E], exact."""
    width = min(LANES, marks.shape[1])
    inner = lax.broadcasted_iota(jnp.int32, (width, width), 0)
    upper = (inner <= lax.broadcasted_iota(jnp.int32, (width, width), 1)).astype(jnp.float32)
    parts, before = [], jnp.zeros((len(marks), 1), jnp.float32)
    for start in range(0, marks.shape[1], width):
        part = marks[:, start : start + width]
        parts.append(_exact(part, upper) + before)
        before = before + jnp.sum(part, axis=1, keepdims=True)
    return jnp.concatenate(parts, axis=1)


def _counts_of_one_row(marks: jax.Array) -> jax.Array:
    """:func:`running_counts` of f32 [1, E], in whole sublanes."""
    return running_counts(jnp.broadcast_to(marks, (SUBLANES, marks.shape[1])))[:1]


def chosen_weights(scores: jax.Array, chosen: jax.Array, rule: RouterRule) -> jax.Array:
    """Weight of every expert, 0 where not chosen: f32 [P, E] as :func:`..router.dense_weights`."""
    weights = jnp.where(chosen > 0, scores, 0.0)
    if rule.renormalize:
        total = by_sublanes(lambda rows: jnp.sum(rows, axis=-1, keepdims=True), weights)
        weights = weights / (total + SUM_EPS)
    return weights * rule.scale


@dataclass(frozen=True)
class Demand:
    """How many rows want each expert, and where it comes in the list of routes; f32 [1, E]."""

    routes: jax.Array
    """rows that chose it"""
    used: jax.Array
    """1 if there are any, else 0"""
    ends: jax.Array
    """routes up to its last"""
    number: jax.Array
    """used experts up to it"""

    @classmethod
    def of(cls, chosen: jax.Array) -> Demand:
        """Of choices f32 [P, E] of 0 and 1."""
        routes = jnp.sum(chosen, axis=0, keepdims=True)
        used = (routes > 0).astype(jnp.float32)
        return cls(routes, used, _counts_of_one_row(routes), _counts_of_one_row(used))

    @property
    def experts(self) -> jax.Array:
        """f32 [1, 1], used experts."""
        return jnp.sum(self.used, axis=1, keepdims=True)

    def listed(self, entries: int) -> jax.Array:
        """f32 [1, entries]: the used experts one after the other, then zeros."""
        ids = lax.broadcasted_iota(jnp.int32, self.used.shape, 1).astype(jnp.float32)
        return _picked_by(entries, self.number - self.used, self.number, ids)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Entries:
    """All routes in order of their experts, those of one expert in order of rows; f32 [1, N]."""

    rows: jax.Array
    """each entry's row; P behind the last route"""
    seen: jax.Array
    """how many experts an entry and those before it have; its own is the last of them"""
    weights: jax.Array
    """each entry's weight; 0 behind the last route"""


def sorted_entries(demand: Demand, chosen: jax.Array, weights: jax.Array, entries: int) -> Entries:
    """The list of routes, along lanes.

    Each entry picks what is known of its expert with a one-hot product, and from that its row.

    Args:
        chosen: f32 [P, E] of 0 and 1, at most ``entries`` of 1.
        weights: f32 [P, E], read where chosen.
        entries: N.
    """
    rows = len(chosen)
    starts = demand.ends - demand.routes
    known = jnp.concatenate([starts, demand.number, _row_counts(chosen), weights], axis=0)
    own = _picked_by(entries, starts, demand.ends, known)
    place = lax.broadcasted_iota(jnp.int32, (1, entries), 1).astype(jnp.float32)
    valid = place < jnp.sum(demand.routes, axis=1, keepdims=True)
    start, number, counts, shares = own[:1], own[1:2], own[2 : 2 + rows], own[2 + rows :]
    behind = (counts <= place - start).astype(jnp.float32)  # rows that come before
    row = jnp.sum(behind, axis=0, keepdims=True)
    mine = lax.broadcasted_iota(jnp.int32, shares.shape, 0).astype(jnp.float32) == row
    return Entries(
        rows=jnp.where(valid, row, rows),
        seen=jnp.where(valid, number, demand.experts),
        weights=jnp.sum(jnp.where(mine, shares, 0.0), axis=0, keepdims=True),
    )


def entries_of_one_row(
    chosen: jax.Array, weights: jax.Array, entries: int
) -> tuple[jax.Array, jax.Array]:
    """The list of one row's routes, along lanes.

    Args:
        chosen: f32 [1, E], ``entries`` of 1, else 0.
        weights: f32 [1, E].

    Returns:
        experts and weights, f32 [1, entries].
    """
    upto = _counts_of_one_row(chosen)
    ids = lax.broadcasted_iota(jnp.int32, chosen.shape, 1).astype(jnp.float32)
    both = jnp.concatenate([ids, weights], axis=0)
    picked = _picked_by(entries, upto - chosen, upto, both)
    return picked[:1], picked[1:]


def _picked_by(entries: int, starts: jax.Array, ends: jax.Array, known: jax.Array) -> jax.Array:
    """What is known of the expert in whose stretch of places each entry lies, 0 in none.

    A one-hot product is exact: sums of one term each, of three parts that bf16 holds.

    Args:
        starts, ends: f32 [1, E], whole numbers. known: f32 [K, E].

    Returns:
        f32 [K, entries].
    """
    parts = _in_bf16(known)
    missing = -len(parts) * len(known) % SUBLANES
    empty = [jnp.zeros((missing, known.shape[1]), jnp.float32)] if missing else []
    left = jnp.concatenate([*parts, *empty], axis=0)
    found = []
    for first in range(0, entries, AT_ONCE):
        count = min(AT_ONCE, entries - first)
        place = lax.broadcasted_iota(jnp.int32, (count, 1), 0).astype(jnp.float32) + first
        here = ((starts <= place) & (place < ends)).astype(jnp.float32)
        contract = (((1,), (1,)), ((), ()))
        picked = lax.dot_general(left, here, contract, preferred_element_type=jnp.float32)
        height = len(known)
        found.append(sum(picked[at * height : (at + 1) * height] for at in range(len(parts))))
    return jnp.concatenate(found, axis=1)


def _in_bf16(values: jax.Array) -> list[jax.Array]:
    """Three f32 parts that bf16 holds; their sum is a value that is 0 or from 2^-102 to 2^127."""
    found = []
    for _ in range(3):
        part = values.astype(jnp.bfloat16).astype(jnp.float32)
        found.append(part)
        values = values - part
    return found


def _row_counts(chosen: jax.Array) -> jax.Array:
    """Inclusive sums down each column: f32 [P, E]."""
    rows = len(chosen)
    shape = (rows, rows)
    lower = lax.broadcasted_iota(jnp.int32, shape, 1) <= lax.broadcasted_iota(jnp.int32, shape, 0)
    return _exact(lower.astype(jnp.float32), chosen)


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of whole numbers up to 256, which bf16 holds, so one pass is exact."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
