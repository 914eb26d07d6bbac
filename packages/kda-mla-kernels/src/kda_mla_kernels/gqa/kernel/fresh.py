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
    """VMEM that holds a block's keys and values."""

    keys: Any
    """i32 [G, D·bytes/4, 128], held values packed along D: row r of the block is lane r"""
    values: Any
    """f32 [S, T up to whole sublanes, G·D]"""


@dataclass(frozen=True)
class FreshTokens:
    """Keeps a block's keys and values, and patches them into groups of slots.

    Keys are kept and patched as 32-bit words of all that a word holds along D: lanes rotate in
    words only, and there are half as many.

    Raises:
        ValueError: a block of more than 128 rows.
    """

    shape: GqaShape
    block: Block
    held: jnp.dtype

    def __post_init__(self) -> None:
        if self.block.padded > LANES:
            raise ValueError(f"a block of {self.block.rows} rows; attention takes at most {LANES}")

    def scratch(self) -> Fresh:
        """Shapes of the scratch."""
        shape, block = self.shape, self.block
        rows = -(-block.tokens // SUBLANES) * SUBLANES
        return Fresh(
            pltpu.VMEM((shape.kv_heads, self._words, LANES), jnp.int32),
            pltpu.VMEM((block.sequences, rows, shape.key_width), jnp.float32),
        )

    @property
    def _words(self) -> int:
        return self.shape.head_dim * self.held.itemsize // 4

    def fill(self, fresh: Fresh, keys: jax.Array, values: jax.Array) -> None:
        """Takes the block's keys and values, f32 [P, G·D] each."""
        shape, tokens = self.shape, self.block.tokens
        columns = jnp.pad(keys, ((0, LANES - keys.shape[0]), (0, 0))).T
        words = pltpu.bitcast(columns.astype(self.held), jnp.int32)
        fresh.keys[...] = words.reshape(shape.kv_heads, self._words, LANES)
        for s in range(self.block.sequences):
            fresh.values[s, :tokens, :] = values[s * tokens : (s + 1) * tokens]

    def patch_keys(self, group: Any, fresh: Fresh, s: Any, run: tuple[Any, Any]) -> None:
        """Puts the first tokens of sequence s into a group of key slots.

        Args:
            group: VMEM reference [G, D, up to 128 slots].
            run: i32 slot of token 0, counted from the group's start, which may be negative; and
                how many tokens.
        """
        first, count = run
        heads, dim, size = group.shape
        old = pltpu.bitcast(group[...].reshape(heads * dim, size), jnp.int32)
        # Two's complement makes the mask a remainder for negative shifts too.
        shift = (first - s * self.block.tokens) & (LANES - 1)
        new = pltpu.roll(fresh.keys[...].reshape(old.shape[0], LANES), shift, 1)[:, :size]
        token = jax.lax.broadcasted_iota(jnp.int32, old.shape, 1) - first
        patched = jnp.where((token >= 0) & (token < count), new, old)
        group[...] = pltpu.bitcast(patched, group.dtype).reshape(group.shape)

    def patch_values(self, group: Any, fresh: Fresh, s: Any, run: tuple[Any, Any]) -> None:
        """Puts the first tokens of sequence s into a group of value slots.

        Args:
            group: VMEM reference [G, slots of the group, D].
            run: i32 slot of token 0, counted from the group's start, which may be negative; and
                how many tokens.
        """
        first, count = run
        old, new, dim = group[...], fresh.values[s], self.shape.head_dim
        token = jax.lax.broadcasted_iota(jnp.int32, old.shape[1:], 0) - first
        heads = []
        for g in range(self.shape.kv_heads):
            head = old[g].astype(jnp.float32)
            for t in range(self.block.tokens):
                row = new[t : t + 1, g * dim : (g + 1) * dim]
                head = jnp.where((token == t) & (t < count), row, head)
            heads.append(head.astype(old.dtype))
        group[...] = jnp.stack(heads)
