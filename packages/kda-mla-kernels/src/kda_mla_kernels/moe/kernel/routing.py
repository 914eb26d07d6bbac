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
AT_ONCE = 32
"""Entries of the list that are found together: more would not stay in registers."""


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
    """Inclusive sums along each row of 0 and 1: f32 [P, E] -> f32 [P, E], exact."""
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Entries:
    """All routes in order of their experts, those of one expert in order of rows; f32 [N, 1]."""

    experts: jax.Array
    rows: jax.Array
    """the row; P for entries behind the last route"""
    ordinals: jax.Array
    """how many other experts come before this one in the list"""
    firsts: jax.Array
    """1 at an expert's first route, else 0"""
    weights: jax.Array


def sorted_entries(chosen: jax.Array, weights: jax.Array, entries: int) -> Entries:
    """The list of routes.

    Args:
        chosen: f32 [P, E] of 0 and 1, at most ``entries`` of 1.
        weights: f32 [P, E].
        entries: N.
    """
    used = jnp.sum(chosen, axis=0, keepdims=True)  # [1, E] routes of each expert
    ends = _counts_of_one_row(used)
    found = [
        _listed(range(at, min(at + AT_ONCE, entries)), ends, used, chosen, weights)
        for at in range(0, entries, AT_ONCE)
    ]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=0), *found)


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
    place = lax.broadcasted_iota(jnp.int32, (entries, 1), 0).astype(jnp.float32)
    before = _counts_of_one_row(chosen) - chosen
    here = jnp.where(before == place, chosen, 0.0)  # [entries, E]
    ids = lax.broadcasted_iota(jnp.int32, chosen.shape, 1).astype(jnp.float32)
    rows = [*_in_bf16(ids, 2), *_in_bf16(weights, 3), *[jnp.zeros_like(ids)] * 3]
    # One pass is exact: sums of one term each, which bf16 holds.
    picked = _picked(jnp.concatenate(rows, axis=0), here, lax.Precision.DEFAULT)
    return picked[:1] + picked[1:2], picked[2:3] + picked[3:4] + picked[4:5]


def _in_bf16(values: jax.Array, parts: int) -> list[jax.Array]:
    """f32 parts that bf16 holds and whose sum is the value; 3 are enough for any, 2 below 2^16."""
    found = []
    for _ in range(parts):
        part = values.astype(jnp.bfloat16).astype(jnp.float32)
        found.append(part)
        values = values - part
    return found


def _listed(
    places: range, ends: jax.Array, used: jax.Array, chosen: jax.Array, weights: jax.Array
) -> Entries:
    """Some entries of the list.

    Args:
        ends: f32 [1, E], routes up to each expert. used: f32 [1, E], its own.
    """
    rows, experts = chosen.shape
    entries = len(places)
    place = lax.broadcasted_iota(jnp.int32, (entries, 1), 0).astype(jnp.float32) + places.start
    passed = (ends <= place).astype(jnp.float32)  # experts whose routes all come before
    expert = jnp.sum(passed, axis=1, keepdims=True)
    base = jnp.sum(passed * used, axis=1, keepdims=True)
    ordinal = jnp.sum(jnp.where(used > 0, passed, 0.0), axis=1, keepdims=True)
    column = lax.broadcasted_iota(jnp.int32, (entries, experts), 1).astype(jnp.float32)
    here = (column == expert).astype(jnp.float32)
    among = place - base  # which of the expert's routes
    behind = _picked(here, _row_counts(chosen)) <= among  # [entries, P] rows that come before
    valid = place < jnp.sum(used, axis=1, keepdims=True)
    row = jnp.where(valid, jnp.sum(behind.astype(jnp.float32), axis=1, keepdims=True), rows)
    mine = lax.broadcasted_iota(jnp.int32, (entries, rows), 1).astype(jnp.float32) == row
    weight = jnp.sum(jnp.where(mine, _picked(here, weights), 0.0), axis=1, keepdims=True)
    first = (valid & (among == 0)).astype(jnp.float32)
    return Entries(jnp.where(valid, expert, 0.0), row, ordinal, first, weight)


def _row_counts(chosen: jax.Array) -> jax.Array:
    """Inclusive sums down each column: f32 [P, E]."""
    rows = len(chosen)
    shape = (rows, rows)
    lower = lax.broadcasted_iota(jnp.int32, shape, 1) <= lax.broadcasted_iota(jnp.int32, shape, 0)
    return _exact(lower.astype(jnp.float32), chosen)


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of whole numbers up to 256, which bf16 holds, so one pass is exact."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _picked(
    a: jax.Array, b: jax.Array, precision: lax.Precision = lax.Precision.HIGHEST
) -> jax.Array:
    """[N, E] · [P, E]ᵀ: f32 [N, P]. Rows of one have a single 1: the other's values as they are."""
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)
