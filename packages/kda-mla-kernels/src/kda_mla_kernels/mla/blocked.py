"""The absorbed form over a cache that stays where it is, block by block, with an online softmax.

A rank may hold all positions or a share of them: every ``stride``-th block, or a run of blocks.

Source: "Online normalizer calculation for softmax" (Milakov, Gimelshein 2018), as in
"FlashAttention" (Dao et al. 2022). Letters as in ``reference``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.mla.absorbed import weigh
from kda_mla_kernels.mla.merge import NOTHING_SEEN, Partial
from kda_mla_kernels.mla.reference import MlaShape
from kda_mla_kernels.numerics import Numerics

__all__ = ["FetchRows", "Share", "attend_blocked"]

FetchRows: TypeAlias = Callable[[jax.Array], jax.Array]
"""Index of one of the share's blocks (traced i32) -> its cache rows [S, block, C + R]."""


@dataclass(frozen=True)
class Share:
    """Which positions a cache holds: block i those from ``first + i · stride`` on.

    Raises:
        ValueError: a size is below 1, ``first`` is negative, or blocks overlap.
    """

    block: int
    """rows of a block"""
    count: int
    """blocks that the cache has room for"""
    first: int = 0
    """position of the first row"""
    stride: int | None = None
    """positions from one block's start to the next one's; None: no gaps"""

    def __post_init__(self) -> None:
        if self.block < 1 or self.count < 1 or self.first < 0:
            raise ValueError(
                f"a share needs block and count of at least 1 and first of at least 0, not"
                f" block={self.block}, count={self.count}, first={self.first}"
            )
        if self.stride is not None and self.stride < self.block:
            raise ValueError(f"stride {self.stride} must be at least the block, {self.block}")

    @classmethod
    def interleaved(cls, rank: int, ranks: int, block: int, count: int) -> Share:
        """Blocks dealt out in turn, so that shares stay equal as the context grows."""
        return cls(block, count, rank * block, ranks * block)

    def start(self, index: jax.Array | int) -> jax.Array | int:
        """Position of a block's first row."""
        return self.first + index * (self.block if self.stride is None else self.stride)

    def blocks_up_to(self, position: jax.Array) -> jax.Array:
        """How many of the blocks begin at or before a position."""
        step = self.block if self.stride is None else self.stride
        return jnp.clip((position - self.first) // step + 1, 0, self.count)


def attend_blocked(
    q: jax.Array,
    fetch: FetchRows,
    share: Share,
    positions: jax.Array,
    shape: MlaShape,
    numerics: Numerics,
) -> Partial:
    """Attention of absorbed queries over a share, up to the last block that some query sees.

    Rounds as the form in one piece does, relative to the largest score so far. A block in which a
    query sees nothing leaves that query's result untouched, so a row's bits do not depend on the
    longest row of the call.

    Args:
        q: [S, T, H, C + R] of ``absorb``.
        fetch: reads one block; see :data:`FetchRows`. Rows of later positions may hold anything
            finite.
        positions: i32 [S, T].

    Returns:
        what the share holds; where a query sees nothing of it, ``total`` and ``latent`` are 0.
    """

    def step(index: jax.Array, past: Partial) -> Partial:
        rows = fetch(index)
        scores = numerics.einsum("sthd,sld->sthl", q, rows) * shape.scale
        slots = share.start(index) + jnp.arange(share.block)
        visible = slots <= positions[:, :, None, None]
        top = jnp.max(jnp.where(visible, scores, NOTHING_SEEN), axis=-1)
        top = jnp.maximum(past.top, top)
        here = weigh(scores, visible, top, rows[..., : shape.latent], numerics)
        keep = jnp.exp(past.top - here.top)
        latent = past.latent * keep[..., None] + here.latent
        return Partial(here.top, past.total * keep + here.total, latent)

    heads = q.shape[:-1]
    nothing = Partial(
        jnp.full(heads, NOTHING_SEEN, jnp.float32),
        jnp.zeros(heads, jnp.float32),
        jnp.zeros((*heads, shape.latent), jnp.float32),
    )
    return lax.fori_loop(0, share.blocks_up_to(jnp.max(positions)), step, nothing)
