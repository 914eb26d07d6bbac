"""Which drafts the target accepts, and the token that follows them, without changing its output.

The target ran the anchor and K drafts; entry k of its logits judges draft k, and entry K stands
after all of them.

**Drafts chosen without chance** are compared with the tokens that the target itself chooses there,
greedily or with plain sampling's own random numbers. Leading drafts that are equal are accepted,
and the target's next choice follows. So the output is, token for token, that of decoding without
drafts, and a draft d is accepted with probability p(d), as much as any lossless rule allows.

**Drafts that were drawn from distributions q** are accepted with probability min(1, p(d) / q(d)),
where p is the target's distribution; the first rejected draft is replaced by a draw from
max(p - q, 0), normalised; if none is rejected, a further token is drawn from entry K. What is
emitted then follows the target's distribution exactly, whatever q is (Leviathan, Kalman and Matias,
"Fast inference from transformers via speculative decoding", 2023, theorem 1; Chen et al.,
"Accelerating large language model decoding with speculative sampling", 2023). A greedy p is
one-hot, so the same rule accepts a draft if and only if it is the arg-max.

Every random number is a function of a sequence's seed, the position of the token it decides, and
what it is for. So a result does not depend on neighbours, and every host of a slice gets the same.
Numbers may be used again for a position that a round judged in vain, without harm: whether a round
gets as far as a position depends only on what belongs to earlier ones.

Letters: S sequences, K drafts of each, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from kda_mla_kernels.sampling import Sampling, probabilities, sample, uniform

__all__ = ["DRAFT_SALT", "Accepted", "accept", "accept_greedy"]

NEXT_SALT = 0
ACCEPT_SALT = 1
RESIDUAL_SALT = 2
DRAFT_SALT = 3
"""For drafters that sample: their own draws must be independent of those made here."""


class Accepted(NamedTuple):
    """What a round decided."""

    accepted: jax.Array
    """i32 [S], drafts accepted, 0..K. ``Model.commit`` moves by one more, the anchor."""
    tokens: jax.Array
    """i32 [S, K + 1]: the accepted drafts, the token that follows them, then -1."""


def accept_greedy(drafts: jax.Array, logits: jax.Array) -> Accepted:
    """Accepts leading drafts that are the arg-max (lowest id among equals).

    Args:
        drafts: i32 [S, K]; -1 where a sequence has no more drafts.
        logits: f32 [S, K + 1, V].

    Raises:
        ValueError: shapes that do not fit each other.
    """
    drafts, logits = jnp.asarray(drafts), jnp.asarray(logits)
    _check(drafts, logits, None)
    return _match(drafts, jnp.argmax(logits, axis=-1).astype(jnp.int32))


def accept(
    drafts: jax.Array,
    logits: jax.Array,
    sampling: Sampling,
    positions: jax.Array,
    draft_probabilities: jax.Array | None = None,
) -> Accepted:
    """Accepts drafts for greedy and sampled sequences side by side.

    The vocabulary is only sorted if some sequence is not greedy.

    Args:
        drafts: i32 [S, K]; -1 where a sequence has no more drafts.
        logits: f32 [S, K + 1, V].
        sampling: parameters of S sequences; filters apply to the target only.
        positions: i32 [S], position of each sequence's first draft.
        draft_probabilities: f32 [S, K, V], the distributions that the drafts were drawn from with
            :data:`DRAFT_SALT`; None if they were chosen without chance.

    Returns:
        Without ``draft_probabilities``, and for greedy sequences, the tokens that decoding without
        drafts gives; else tokens of the same distribution, which change with the drafts.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    drafts, logits, positions = map(jnp.asarray, (drafts, logits, positions))
    _check(drafts, logits, draft_probabilities)
    if draft_probabilities is None:
        return _match(drafts, _chosen(logits, sampling, positions))
    q = jnp.asarray(draft_probabilities)

    def sampled() -> Accepted:
        return _accept_drawn(drafts, logits, sampling, positions, q)

    any_sampled = jnp.any(jnp.asarray(sampling.temperature) > 0)
    return jax.lax.cond(any_sampled, sampled, lambda: accept_greedy(drafts, logits))


def _match(drafts: jax.Array, chosen: jax.Array) -> Accepted:
    """Accepts what equals the target's choices [S, K + 1]."""
    accepted = _leading(drafts == chosen[:, :-1])
    following = jnp.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]
    return _emit(drafts, accepted, following)


def _chosen(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """i32 [S, K + 1], plain sampling's choice after each row."""
    rows = logits.shape[1]
    at = positions[:, None] + jnp.arange(rows)
    flat = logits.reshape(-1, logits.shape[-1])
    return sample(flat, _repeated(sampling, rows), at.reshape(-1)).reshape(at.shape)


def _accept_drawn(
    drafts: jax.Array,
    logits: jax.Array,
    sampling: Sampling,
    positions: jax.Array,
    q: jax.Array,
) -> Accepted:
    num_sequences, num_drafts = drafts.shape
    target = _target_probabilities(logits, sampling)
    at = positions[:, None] + jnp.arange(num_drafts)
    chance = _uniforms(sampling, at, ACCEPT_SALT)
    p_draft, q_draft = _of(target[:, :-1], drafts), _of(q, drafts)
    accepted = _leading((chance * q_draft < p_draft) & (drafts >= 0))

    row = jnp.arange(num_sequences)
    # An empty draft stands after the last one: where it is reached, nothing was rejected.
    rejected = jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=-1)[row, accepted] >= 0
    q_next = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))[row, accepted]
    p_next = target[row, accepted]
    fresh, again = (
        uniform(sampling.seed, positions + accepted, salt) for salt in (NEXT_SALT, RESIDUAL_SALT)
    )
    left = jnp.where(rejected[:, None], _residual(p_next, q_next), p_next)
    following = _draw(left, jnp.where(rejected, again, fresh))
    return _emit(drafts, accepted, following)


def _repeated(sampling: Sampling, times: int) -> Sampling:
    """Parameters of S sequences for ``times`` rows of each."""
    return jax.tree.map(lambda value: jnp.repeat(jnp.asarray(value), times, axis=0), sampling)


def _target_probabilities(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """f32 [S, K + 1, V]."""
    flat = logits.reshape(-1, logits.shape[-1])
    return probabilities(flat, _repeated(sampling, logits.shape[1])).reshape(logits.shape)


def _uniforms(sampling: Sampling, positions: jax.Array, salt: int) -> jax.Array:
    """f32 of the shape of ``positions`` [S, K]."""
    columns = positions.shape[1]
    seeds = jnp.repeat(jnp.asarray(sampling.seed), columns, axis=0)
    return uniform(seeds, positions.reshape(-1), salt).reshape(positions.shape)


def _of(distributions: jax.Array, tokens: jax.Array) -> jax.Array:
    """The probability of one token each; of any token where there is none (-1)."""
    index = jnp.maximum(tokens, 0)[:, :, None]
    return jnp.take_along_axis(distributions, index, axis=-1)[:, :, 0]


def _residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """max(p - q, 0) over its sum. Where rounding leaves no mass, p itself."""
    excess = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(excess, axis=-1, keepdims=True)
    return jnp.where(mass > 0, excess / jnp.where(mass > 0, mass, 1.0), p)


def _draw(distribution: jax.Array, chance: jax.Array) -> jax.Array:
    """One token of each row by the inverse distribution function, in the order of ids."""
    ends = jnp.cumsum(distribution, axis=-1)
    below = ends <= chance[:, None] * ends[:, -1:]
    # Rounding may make the last product reach the sum: fall back to the last token with a chance.
    ids = jnp.arange(distribution.shape[-1])
    last = jnp.max(jnp.where(distribution > 0, ids, 0), axis=-1)
    return jnp.minimum(jnp.sum(below, axis=-1), last).astype(jnp.int32)


def _leading(good: jax.Array) -> jax.Array:
    """i32 [S], how many entries from the left are true."""
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _emit(drafts: jax.Array, accepted: jax.Array, following: jax.Array) -> Accepted:
    column = jnp.arange(drafts.shape[1] + 1)
    count = accepted[:, None]
    kept = jnp.pad(drafts.astype(jnp.int32), ((0, 0), (0, 1)))
    tokens = jnp.where(column < count, kept, -1)
    return Accepted(accepted, jnp.where(column == count, following[:, None], tokens))


def _check(drafts: jax.Array, logits: jax.Array, given: jax.Array | None) -> None:
    if drafts.ndim != 2:
        raise ValueError(f"drafts must be [S, K], not {drafts.shape}")
    num_sequences, num_drafts = drafts.shape
    if logits.ndim != 3 or logits.shape[:2] != (num_sequences, num_drafts + 1):
        raise ValueError(
            f"logits must be [{num_sequences}, {num_drafts + 1}, V] for drafts {drafts.shape}, not"
            f" {logits.shape}"
        )
    expected = (num_sequences, num_drafts, logits.shape[-1])
    if given is not None and given.shape != expected:
        raise ValueError(f"draft_probabilities must be {expected}, not {given.shape}")
