"""Choosing the next token from logits: greedy, temperature, top-k, top-p, min-p, with seeds.

Filters apply in the order temperature, top-k, top-p, min-p, each on the distribution that the one
before left, renormalised. Ties are cut in favour of the lowest id, so the kept set has a definite
size. A row's choice is a function of its logits, its parameters, its seed and the position of the
token that is chosen: never of its neighbours, and the same on every host.
All functions are compiled, once per shape, so they can be called outside of other programs.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "Sampling",
    "SamplingParams",
    "decided_by",
    "probabilities",
    "sample",
    "sample_candidates",
    "uniform",
]


@dataclass(frozen=True)
class SamplingParams:
    """One request's parameters. ``temperature=0`` is greedy and ignores the others.

    Args:
        temperature: >= 0.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        seed: any integer; its low 64 bits count.

    Raises:
        ValueError: a value outside its range; the message names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number >= 0, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 keeps all tokens), not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], not {self.min_p}")


MOST_KEPT = 2**31 - 1
COLDEST, HOTTEST = 2.0**-100, 2.0**100
"""Temperatures beyond these choose as these do, but their reciprocals leave the f32 range."""


def _f32_temperature(temperature: float) -> float:
    return min(max(temperature, COLDEST), HOTTEST) if temperature > 0 else 0.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """The parameters of R rows as arrays, so that no value is compiled into a program."""

    temperature: jax.Array | np.ndarray
    """f32 [R]"""
    top_k: jax.Array | np.ndarray
    """i32 [R], 0 keeps all"""
    top_p: jax.Array | np.ndarray
    """f32 [R]"""
    min_p: jax.Array | np.ndarray
    """f32 [R]"""
    seed: jax.Array | np.ndarray
    """u32 [R, 2], high word first"""

    @classmethod
    def of(cls, rows: Sequence[SamplingParams]) -> Sampling:
        """Stacks one request's parameters per row."""
        words = [(row.seed >> 32 & 0xFFFFFFFF, row.seed & 0xFFFFFFFF) for row in rows]
        return cls(
            temperature=np.array([_f32_temperature(row.temperature) for row in rows], np.float32),
            top_k=np.array([min(row.top_k, MOST_KEPT) for row in rows], np.int32),
            top_p=np.array([row.top_p for row in rows], np.float32),
            min_p=np.array([row.min_p for row in rows], np.float32),
            seed=np.array(words, np.uint32).reshape(len(rows), 2),
        )

    @classmethod
    def greedy(cls, rows: int) -> Sampling:
        """R greedy rows."""
        return cls.of([SamplingParams()] * rows)


@jax.jit
def uniform(
    seed: jax.Array | np.ndarray, position: jax.Array | np.ndarray, salt: int = 0
) -> jax.Array:
    """Uniform numbers in [0, 1) that depend on seed, position and salt only.

    Args:
        seed: u32 [R, 2]. position: i32 [R]. salt: separates independent draws for one token.

    Returns:
        f32 [R].
    """

    def one(words: jax.Array, at: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, at), salt))

    return jax.vmap(one)(jnp.asarray(seed, jnp.uint32), jnp.asarray(position, jnp.int32))


def decided_by(sampling: Sampling, candidates: int) -> bool:
    """Whether the largest ``candidates`` logits of each row decide its choice.

    Args:
        sampling: of concrete arrays.
    """
    greedy = np.asarray(sampling.temperature) == 0
    top_k = np.asarray(sampling.top_k)
    return bool(np.all(greedy | ((top_k > 0) & (top_k <= candidates))))


def _ranked(logits: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Ids by falling logit (lowest id first among equals) and their filtered probabilities."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    return order, _filtered(jnp.take_along_axis(logits, order, axis=-1), sampling)


def _filtered(ranked: jax.Array, sampling: Sampling) -> jax.Array:
    """Falling logits [R, N] -> what the filters leave of their probabilities."""
    greedy = sampling.temperature == 0
    temperature = jnp.where(greedy, 1.0, sampling.temperature)[:, None]
    # Differences to the best are divided, not logits: a small temperature would make them infinite.
    ranked = (ranked - ranked[:, :1]) / temperature
    place = jnp.arange(ranked.shape[-1])[None, :]

    top_k = jnp.where(greedy, 1, jnp.where(sampling.top_k > 0, sampling.top_k, ranked.shape[-1]))
    keep = place < top_k[:, None]
    p = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    # Rounding lets the sum reach 1 early, where top_p = 1 must keep all.
    top_p = sampling.top_p[:, None]
    keep &= (before < top_p) | (top_p >= 1) | (place == 0)
    p = jnp.where(keep, p, 0.0)
    p = jnp.where(p >= sampling.min_p[:, None] * p[:, :1], p, 0.0)
    return p / jnp.sum(p, axis=-1, keepdims=True)


@jax.jit
def probabilities(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The distribution that :func:`sample` draws from.

    Args:
        logits: f32 [R, V].

    Returns:
        f32 [R, V], each row sums to 1; one-hot where the row is greedy.
    """
    order, ranked = _ranked(logits, sampling)
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros_like(ranked).at[rows, order].set(ranked)


@jax.jit
def sample(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """Chooses one token per row.

    The vocabulary is only sorted if some row is not greedy.

    Args:
        logits: f32 [R, V].
        positions: i32 [R], position in its sequence of the token that is chosen.

    Returns:
        i32 [R].
    """

    def draw() -> jax.Array:
        order, ranked = _ranked(logits, sampling)
        return _drawn(order, ranked, uniform(sampling.seed, positions))

    def best() -> jax.Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return jax.lax.cond(jnp.any(jnp.asarray(sampling.temperature) > 0), draw, best)


@jax.jit
def sample_candidates(
    values: jax.Array, ids: jax.Array, sampling: Sampling, positions: jax.Array
) -> jax.Array:
    """As :func:`sample`, from the largest logits of each row alone.

    The choice is the same where :func:`decided_by` holds, up to the rounding of sums of
    probabilities, which have fewer terms here.

    Args:
        values: f32 [R, N], falling; of equal ones the lowest id first.
        ids: i32 [R, N].
        sampling, positions: as for :func:`sample`.

    Returns:
        i32 [R].
    """
    return _drawn(ids, _filtered(values, sampling), uniform(sampling.seed, positions))


def _drawn(ids: jax.Array, ranked: jax.Array, u: jax.Array) -> jax.Array:
    """The inverse of the distribution function: the first id whose cumulative probability exceeds
    ``u``. Those of probability 0 come last and are never reached."""
    below = jnp.cumsum(ranked, axis=-1) <= u[:, None]
    last = jnp.sum(ranked > 0, axis=-1) - 1
    place = jnp.minimum(jnp.sum(below, axis=-1), last)
    return jnp.take_along_axis(ids, place[:, None], axis=-1)[:, 0].astype(jnp.int32)
