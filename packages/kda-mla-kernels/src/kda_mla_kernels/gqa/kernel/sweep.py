"""One pass over a layer's cache, which is streamed through VMEM tile by tile.

While a tile is worked on, the next one is loaded into the other buffer, across sequences: tile
number n of a layer, counted over all its sequences, lives in buffer ``n mod 2``. Its load starts
when tile n - 1 is taken up, after all reads of tile n - 2, which had the same buffer; it is waited
for before tile n is read. So a layer ends with nothing in flight, and the first tile of the next
layer goes into buffer 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.block import SUBLANES, Block, Where
from kda_mla_kernels.gqa.kernel.fresh import Fresh, FreshTokens
from kda_mla_kernels.gqa.kernel.shape import GqaMemory, GqaShape
from kda_mla_kernels.gqa.kernel.softmax import Running, attend
from kda_mla_kernels.gqa.kernel.tiles import LANES, groups_of
from kda_mla_kernels.numerics import Numerics

__all__ = ["Source", "Sweep", "SweepScratch"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SweepScratch:
    """VMEM and semaphores of a pass."""

    keys: Any
    """held [2, G, D, K], K is the tile"""
    values: Any
    """held [2, G, K, D]"""
    heads: Any
    """f32 [S·T, H, D] queries, which their results replace sequence by sequence"""
    fresh: Fresh
    loads: Any
    """DMA semaphores [2, 2]: buffer; keys or values"""


class Source(NamedTuple):
    """What a layer's pass reads, inside the kernel."""

    memory: GqaMemory
    where: Where
    layer: Any


@dataclass(frozen=True)
class Sweep:
    """Attention of a block's queries over the cache and the block's own tokens.

    Attributes:
        slots: L, below 128 or a multiple of 128.
        tile: keys per load, a divisor of the slots.

    Raises:
        ValueError: slots, tile or block that do not fit together.
    """

    shape: GqaShape
    block: Block
    numerics: Numerics
    held: jnp.dtype
    slots: int
    tile: int

    def __post_init__(self) -> None:
        groups_of(self.block.tokens, self.slots)
        if self.tile < 1 or self.slots % self.tile:
            raise ValueError(f"a tile of {self.tile} keys does not divide {self.slots} slots")
        if self.tile % LANES and self.tile != self.slots:
            raise ValueError(f"a tile of {self.tile} keys; it must be a multiple of {LANES}")
        if self.block.tokens > self.slots:
            raise ValueError(f"{self.block.tokens} tokens do not fit into {self.slots} slots")

    @property
    def fresh(self) -> FreshTokens:
        """The block's own tokens."""
        return FreshTokens(self.shape, self.block)

    def scratch(self) -> SweepScratch:
        """Shapes of the scratch."""
        shape = self.shape
        return SweepScratch(
            keys=pltpu.VMEM((2, shape.kv_heads, shape.head_dim, self.tile), self.held),
            values=pltpu.VMEM((2, shape.kv_heads, self.tile, shape.head_dim), self.held),
            heads=pltpu.VMEM((self.block.rows, shape.query_heads, shape.head_dim), jnp.float32),
            fresh=self.fresh.scratch(),
            loads=pltpu.SemaphoreType.DMA((2, 2)),
        )

    def start(self, scratch: SweepScratch, source: Source) -> None:
        """Starts the load of the first tile of sequence 0."""
        self._start(scratch, source, (0, 0), 0)

    def __call__(self, scratch: SweepScratch, source: Source) -> None:
        """Replaces the queries in ``scratch.heads`` by their results, not yet rounded.

        Tokens of a block see the cache up to the block's first position and, through
        ``scratch.fresh``, each other up to themselves. A token at or beyond slot L is not seen.
        """

        def sequence(s: jax.Array, taken: jax.Array) -> jax.Array:
            return self._sequence(scratch, source, s, taken)

        lax.fori_loop(0, self.block.sequences, sequence, jnp.int32(0))

    def _sequence(
        self, scratch: SweepScratch, source: Source, s: jax.Array, taken: jax.Array
    ) -> jax.Array:
        """All tiles of a sequence; ``taken`` counts the layer's tiles before and after."""
        position = source.where.positions[s]
        end = jnp.minimum(position + self.block.tokens, self.slots)
        last = lax.div(end - 1, self.tile)
        queries = self._queries(scratch, s)

        def step(index: jax.Array, running: Running) -> Running:
            buffer, other = self._buffer(taken + index), self._buffer(taken + index + 1)
            self._start_next(scratch, source, (s, index, last), other)
            self._wait(scratch, source, buffer)
            first = position - index * self.tile

            @pl.when(first < self.tile)
            def _() -> None:
                self._patch(scratch, buffer, s, (position, first))

            tile = scratch.keys.at[buffer], scratch.values.at[buffer]
            visible = self._visible(queries.shape[1], first)
            return attend(running, queries, tile, visible, self.numerics)

        heads, rows, dim = queries.shape
        running = lax.fori_loop(0, last + 1, step, Running.empty(heads * rows, dim))
        self._keep(scratch, s, (running.out / running.total).reshape(queries.shape))
        return taken + last + 1

    def _buffer(self, number: jax.Array) -> jax.Array:
        """Where the layer's tile of this number lives."""
        return lax.rem(number, 2)

    def _copies(
        self, scratch: SweepScratch, source: Source, at: tuple[Any, Any], buffer: Any
    ) -> tuple[Any, Any]:
        row, tile = at
        slots = pl.ds(pl.multiple_of(tile * self.tile, self.tile), self.tile)
        keys, values = (
            ref.at[source.layer, row] for ref in (source.memory.keys, source.memory.values)
        )
        load = scratch.loads.at
        return (
            pltpu.make_async_copy(keys.at[:, :, slots], scratch.keys.at[buffer], load[buffer, 0]),
            pltpu.make_async_copy(values.at[:, slots], scratch.values.at[buffer], load[buffer, 1]),
        )

    def _start(
        self, scratch: SweepScratch, source: Source, at: tuple[Any, Any], buffer: Any
    ) -> None:
        s, tile = at
        for copy in self._copies(scratch, source, (source.where.rows[s], tile), buffer):
            copy.start()

    def _start_next(
        self, scratch: SweepScratch, source: Source, at: tuple[Any, Any, Any], buffer: Any
    ) -> None:
        """Starts the load of the tile after tile ``index`` of sequence s, if there is one."""
        s, index, last = at
        more = index < last
        following = jnp.where(more, s, s + 1)

        @pl.when(following < self.block.sequences)
        def _() -> None:
            self._start(scratch, source, (following, jnp.where(more, index + 1, 0)), buffer)

    def _wait(self, scratch: SweepScratch, source: Source, buffer: Any) -> None:
        for copy in self._copies(scratch, source, (0, 0), buffer):
            copy.wait()

    def _patch(
        self, scratch: SweepScratch, buffer: Any, s: jax.Array, token: tuple[Any, Any]
    ) -> None:
        """Puts the block's own tokens into the tile.

        Args:
            token: slot of token 0, and the same counted from the tile's start.
        """
        position, first = token
        for patch, tile, axis, groups in zip(
            (self.fresh.patch_keys, self.fresh.patch_values),
            (scratch.keys.at[buffer], scratch.values.at[buffer]),
            (2, 1),
            groups_of(self.block.tokens, self.slots),
        ):
            start = first - lax.rem(position, groups.size)
            for number in range(groups.count):
                at = start + number * groups.size

                def put(patch=patch, tile=tile, axis=axis, groups=groups, at=at) -> None:
                    run = pl.ds(pl.multiple_of(at, groups.size), groups.size)
                    group = tile.at[(slice(None),) * axis + (run,)]
                    patch(group, scratch.fresh, s, (first - at, self.block.tokens))

                # The size of a group divides the tile, so a group is in one tile; and if there
                # can be one group only, the tile with token 0 has it.
                if groups.count == 1:
                    put()
                else:
                    end = jnp.minimum(first + self.block.tokens, self.tile)
                    pl.when((at >= 0) & (at < end))(put)

    def _visible(self, rows: int, first: jax.Array) -> jax.Array:
        """bool [N, K]: whether a query sees a slot; token 0 is at slot ``first`` of the tile."""
        row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        token = jnp.zeros_like(row)
        for t in range(1, self.block.tokens):
            token += (row >= t * self.shape.group).astype(jnp.int32)
        return lax.broadcasted_iota(jnp.int32, (rows, self.tile), 1) <= first + token

    def _queries(self, scratch: SweepScratch, s: jax.Array) -> jax.Array:
        """Rounded [G, N, D]: by key/value head, then token, then head; padded by zeros."""
        shape, tokens = self.shape, self.block.tokens
        x = scratch.heads[pl.ds(s * tokens, tokens)]
        used = tokens * shape.group

        def of_head(g: int) -> jax.Array:
            rows = [x[t, g * shape.group : (g + 1) * shape.group] for t in range(tokens)]
            return jnp.pad(jnp.concatenate(rows), ((0, -used % SUBLANES), (0, 0)))

        return self.numerics.round(jnp.stack([of_head(g) for g in range(shape.kv_heads)]))

    def _keep(self, scratch: SweepScratch, s: jax.Array, out: jax.Array) -> None:
        """The inverse of ``_queries``, for results f32 [G, N, D]."""
        tokens, group = self.block.tokens, self.shape.group
        rows = [
            jnp.concatenate([head[t * group : (t + 1) * group] for head in out])
            for t in range(tokens)
        ]
        scratch.heads[pl.ds(s * tokens, tokens)] = jnp.stack(rows)
