"""The keys and values of a block's own tokens, put where the cache will have them.

Patched into a copy of a cache group, they make it what it will be after the commit; so attention
over the patched copy rounds exactly as attention over the committed cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.block import SUBLANES, Block
from kda_mla_kernels.gqa.kernel.shape import GqaShape
from kda_mla_kernels.gqa.kernel.tiles import LANES

__all__ = ["Fresh", "FreshTokens"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fresh:
    """VMEM that holds a block's keys and values: rows of tokens, up to the period."""

    keys: Any
    """f32 [S, period, G·D], held values"""
    values: Any
    """the same"""


@dataclass(frozen=True)
class FreshTokens:
    """Keeps a block's keys and values, and patches them into groups of slots.

    A group takes the rows over and over, rotated so that the right one is at each slot, and keeps
    those of its slots that have a token. So there is one rotation for all tokens, and of whole
    rows, before keys become columns.

    Raises:
        ValueError: more than 128 tokens of a sequence.
    """

    shape: GqaShape
    block: Block

    def __post_init__(self) -> None:
        if self.block.tokens > LANES:
            raise ValueError(
                f"a block of {self.block.tokens} tokens a sequence; attention takes at most {LANES}"
            )

    @property
    def _period(self) -> int:
        """Rows until they repeat: a power of two, so that a group of 128 has whole periods."""
        return max(SUBLANES, 1 << (self.block.tokens - 1).bit_length())

    def scratch(self) -> Fresh:
        """Shapes of the scratch."""
        rows = pltpu.VMEM((self.block.sequences, self._period, self.shape.key_width), jnp.float32)
        return Fresh(rows, rows)

    def fill(self, fresh: Fresh, keys: jax.Array, values: jax.Array) -> None:
        """Takes the block's keys and values, f32 [P, G·D] each."""
        tokens = self.block.tokens
        for s in range(self.block.sequences):
            rows = slice(s * tokens, (s + 1) * tokens)
            fresh.keys[s, :tokens, :] = keys[rows]
            fresh.values[s, :tokens, :] = values[rows]

    def patch_keys(self, group: Any, fresh: Fresh, s: Any, run: tuple[Any, Any]) -> None:
        """Puts the first tokens of sequence s into a group of key slots.

        Args:
            group: VMEM reference [G, D, up to 128 slots].
            run: i32 slot of token 0, counted from the group's start, which may be negative; and
                how many tokens.
        """
        heads, dim, size = group.shape
        columns = self._repeated(fresh.keys[s], run[0], LANES).T[:, :size]
        # As words of two 16-bit dims, there are half as many to choose from.
        new, old = (
            pltpu.bitcast(x, jnp.int32)
            for x in (columns.astype(group.dtype), group[...].reshape(heads * dim, size))
        )
        chosen = jnp.where(_mine(new.shape, 1, run), new, old)
        group[...] = pltpu.bitcast(chosen, group.dtype).reshape(group.shape)

    def patch_values(self, group: Any, fresh: Fresh, s: Any, run: tuple[Any, Any]) -> None:
        """Puts the first tokens of sequence s into a group of value slots.

        Args:
            group: VMEM reference [G, slots of the group, D].
            run: as for keys.
        """
        heads, size, dim = group.shape
        rows = self._repeated(fresh.values[s], run[0], size)
        new = jnp.stack([rows[:, g * dim : (g + 1) * dim] for g in range(heads)])
        chosen = jnp.where(_mine(new.shape, 1, run), new, group[...].astype(jnp.float32))
        group[...] = chosen.astype(group.dtype)

    def _repeated(self, rows: jax.Array, first: Any, size: int) -> jax.Array:
        """[size, G·D] with token 0 at row ``first``, modulo the period."""
        # Two's complement makes the mask a remainder for negative shifts too.
        rolled = pltpu.roll(rows, first & (self._period - 1), 0)
        return jnp.concatenate([rolled] * -(-size // self._period))[:size]


def _mine(shape: tuple[int, ...], axis: int, run: tuple[Any, Any]) -> jax.Array:
    """Which slots along an axis are those of the run's tokens."""
    first, count = run
    token = jax.lax.broadcasted_iota(jnp.int32, shape, axis) - first
    return (token >= 0) & (token < count)
