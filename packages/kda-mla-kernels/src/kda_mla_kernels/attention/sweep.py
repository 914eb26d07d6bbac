"""One pass over a layer's cache, which is streamed through VMEM tile by tile.

While a tile is worked on, the next one is loaded, across sequences: tile number n of a layer,
counted over all its sequences, lives in buffer ``n mod B``. Its load starts when tile n - 1 is
taken up, after all reads of tile n - B, which had the same buffer; it is waited for before tile n
is read. So a layer ends with nothing in flight, and the first tile of the next layer goes into
buffer 0.

Two buffers are enough if a tile is done with before the next one is taken up. With three, a tile is
scored before the weights of the one before it are: neither waits for the other, so the matrix units
have work while a softmax goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.attention.cache import Cache, CacheShape
from kda_mla_kernels.attention.fresh import Fresh, FreshTokens
from kda_mla_kernels.attention.softmax import Running, add_tile
from kda_mla_kernels.attention.split import Run, Split, whole_run
from kda_mla_kernels.attention.tiles import LANES, Groups, check_tile, groups_of
from kda_mla_kernels.block import SUBLANES, Block, Where
from kda_mla_kernels.numerics import Numerics

__all__ = ["CacheSweep", "Scores", "Source", "SweepScratch"]

Scores: TypeAlias = list[jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SweepScratch:
    """VMEM and semaphores of a pass."""

    columns: Any
    """held [B, (G,) column dim, K], K is the tile"""
    rows: Any
    """held [B, (G,) K, row dim]"""
    heads: Any
    """f32 [S·T, H, D] queries, which their results replace sequence by sequence"""
    fresh: Fresh
    loads: Any
    """DMA semaphores [B, 2]: buffer; columns or rows"""


class Source(NamedTuple):
    """What a layer's pass reads, inside the kernel."""

    cache: Cache
    where: Where
    layer: Any


@dataclass(frozen=True)
class CacheSweep(ABC):
    """Attention of a block's queries over the cache and the block's own tokens.

    Attributes:
        block: sequences, and at most 128 tokens of each.
        tile: slots per load, a divisor of the cache's.
        heads: H, query heads.
        width: D, the most values that a query head or its result has.
        split: how positions are dealt out to ranks; None where the cache holds all.
        ahead: whether a tile is scored before the one before it is weighed; the bits are the same.

    Raises:
        ValueError: slots, tile, block or split that do not fit together.
    """

    cache: CacheShape
    block: Block
    numerics: Numerics
    tile: int
    heads: int
    width: int
    split: Split | None = None
    ahead: bool = False

    def __post_init__(self) -> None:
        check_tile(self.tile, self.block.tokens, self.cache.slots)
        self.fresh  # noqa: B018 (checks the block)
        if self.split is not None:
            small, large = sorted((self.tile, self.split.block))
            if large % small or self.tile % LANES or self.cache.slots % self.split.block:
                raise ValueError(
                    f"{self.cache.slots} slots in tiles of {self.tile} do not hold whole blocks of"
                    f" {self.split.block} positions"
                )

    @abstractmethod
    def scores(self, queries: jax.Array, tile: Cache) -> Scores:
        """f32 [N, K] of each key/value head.

        Args:
            queries: [G, N, D] in the activation dtype.
            tile: VMEM references of columns and rows.
        """

    @abstractmethod
    def result(self, running: Running) -> jax.Array:
        """f32 [G·N, up to D] that the queries get."""

    @property
    def group(self) -> int:
        """H / G, query heads that share a key/value head."""
        return self.heads // self.cache.head_count

    @property
    def fresh(self) -> FreshTokens:
        """The block's own tokens."""
        return FreshTokens(self.cache, self.block)

    def scratch(self) -> SweepScratch:
        """Shapes of the scratch."""
        cache, buffers = self.cache, self._buffers
        return SweepScratch(
            columns=pltpu.VMEM((buffers, *cache.heads, cache.column_dim, self.tile), cache.held),
            rows=pltpu.VMEM((buffers, *cache.heads, self.tile, cache.row_dim), cache.held),
            heads=pltpu.VMEM((self.block.rows, self.heads, self.width), jnp.float32),
            fresh=self.fresh.scratch(),
            loads=pltpu.SemaphoreType.DMA((buffers, 2)),
        )

    @property
    def _buffers(self) -> int:
        return 3 if self.ahead else 2

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
        run, last = self._run(position), self._last(position)
        queries = self._queries(scratch, s)

        def take(index: Any) -> Cache:
            self._start_next(scratch, source, (s, index, last), self._buffer(taken + index + 1))
            self._wait(scratch, source, self._buffer(taken + index))
            self._patch(scratch, self._buffer(taken + index), s, (run, index))
            return tile(index)

        def tile(index: Any) -> Cache:
            buffer = self._buffer(taken + index)
            return Cache(scratch.columns.at[buffer], scratch.rows.at[buffer])

        def weigh(running: Running, scores: Scores, index: Any) -> Running:
            visible = self._visible(queries.shape[1], position, index)
            values = self._by_head(tile(index).rows)
            return add_tile(running, scores, values, visible, self.numerics)

        def step(index: jax.Array, running: Running) -> Running:
            return weigh(running, self.scores(queries, take(index)), index)

        def step_ahead(index: jax.Array, carry: tuple[Scores, Running]) -> tuple[Scores, Running]:
            following = self.scores(queries, take(index + 1))
            return following, weigh(carry[1], carry[0], index)

        heads, rows, _ = queries.shape
        running = Running.empty(heads * rows, self.cache.row_dim)
        if self.ahead:
            scores = self.scores(queries, take(0))
            scores, running = lax.fori_loop(0, last, step_ahead, (scores, running))
            running = weigh(running, scores, last)
        else:
            running = lax.fori_loop(0, last + 1, step, running)
        self._keep(scratch, s, self.result(running).reshape(heads, rows, -1))
        return taken + last + 1

    def _run(self, position: jax.Array) -> Run:
        tokens = self.block.tokens
        if self.split is None:
            return whole_run(position, tokens)
        return self.split.run(position, tokens)

    def _last(self, position: jax.Array) -> jax.Array:
        """The last tile that is taken up: there is always one, so that loads follow each other."""
        end = position + self.block.tokens
        if self.split is not None:
            end = jnp.maximum(self.split.count(end - 1), 1)
        return lax.div(jnp.minimum(end, self.cache.slots) - 1, self.tile)

    def _buffer(self, number: jax.Array) -> jax.Array:
        """Where the layer's tile of this number lives."""
        return lax.rem(number, self._buffers)

    def _copies(
        self, scratch: SweepScratch, source: Source, at: tuple[Any, Any], buffer: Any
    ) -> tuple[Any, Any]:
        row, tile = at
        slots = pl.ds(pl.multiple_of(tile * self.tile, self.tile), self.tile)
        columns, rows = (ref.at[source.layer, row] for ref in source.cache)
        load = scratch.loads.at
        return (
            pltpu.make_async_copy(
                columns.at[..., slots], scratch.columns.at[buffer], load[buffer, 0]
            ),
            pltpu.make_async_copy(rows.at[..., slots, :], scratch.rows.at[buffer], load[buffer, 1]),
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

    def _patch(self, scratch: SweepScratch, buffer: Any, s: jax.Array, at: tuple[Run, Any]) -> None:
        """Puts those of the block's own tokens into a tile that have a slot there.

        Args:
            at: slots of the tokens; index of the tile.
        """
        run, index = at
        here = run._replace(slot=run.slot - index * self.tile)
        among = here.first < self.tile
        if self.split is not None:
            among &= here.begin < here.end
        columns, rows = groups_of(self.block.tokens, self.cache.slots)
        fresh = self.fresh

        def patch_columns(slots: Any, there: Run) -> None:
            fresh.patch_columns(scratch.columns.at[buffer, ..., slots], scratch.fresh, s, there)

        def patch_rows(slots: Any, there: Run) -> None:
            fresh.patch_rows(scratch.rows.at[buffer, ..., slots, :], scratch.fresh, s, there)

        @pl.when(among)
        def _() -> None:
            self._patch_groups(columns, run, here, patch_columns)
            self._patch_groups(rows, run, here, patch_rows)

    def _patch_groups(
        self, groups: Groups, run: Run, here: Run, patch: Callable[[Any, Run], None]
    ) -> None:
        """Calls ``patch(slots, run counted from their start)`` for each group with a token.

        Args:
            run: slots of the tokens. here: the same counted from the tile's start.
        """
        start = here.first - lax.rem(run.first, groups.size)
        for number in range(groups.count):
            at = start + number * groups.size

            def put(at: Any = at) -> None:
                slots = pl.ds(pl.multiple_of(at, groups.size), groups.size)
                patch(slots, here._replace(slot=here.slot - at))

            # The size of a group divides the tile, so a group is in one tile; and if there can be
            # one group only, the tile with token 0 has it.
            if groups.count == 1:
                put()
            else:
                end = jnp.minimum(here.slot + here.end, self.tile)
                pl.when((at >= 0) & (at < end))(put)

    def _by_head(self, rows: Any) -> list[Any]:
        """A tile's rows of each key/value head."""
        if not self.cache.heads:
            return [rows]
        return [rows.at[g] for g in range(self.cache.head_count)]

    def _visible(self, rows: int, position: jax.Array, index: jax.Array) -> jax.Array:
        """bool [N, K]: whether a query of tokens from ``position`` on sees a slot of a tile."""
        row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        token = jnp.zeros_like(row)
        for t in range(1, self.block.tokens):
            token += (row >= t * self.group).astype(jnp.int32)
        if self.split is None:
            slot = lax.broadcasted_iota(jnp.int32, (rows, self.tile), 1)
            return slot <= position - index * self.tile + token
        start, offsets = self.split.offsets(index, self.tile)
        return offsets <= position - start + token

    def _queries(self, scratch: SweepScratch, s: jax.Array) -> jax.Array:
        """Rounded [G, N, D]: by key/value head, then token, then head; padded by zeros."""
        tokens, group = self.block.tokens, self.group
        x = scratch.heads[pl.ds(s * tokens, tokens)]
        used = tokens * group

        def of_head(g: int) -> jax.Array:
            rows = [x[t, g * group : (g + 1) * group] for t in range(tokens)]
            return jnp.pad(jnp.concatenate(rows), ((0, -used % SUBLANES), (0, 0)))

        return self.numerics.round(jnp.stack([of_head(g) for g in range(self.cache.head_count)]))

    def _keep(self, scratch: SweepScratch, s: jax.Array, out: jax.Array) -> None:
        """The inverse of ``_queries``, for results f32 [G, N, up to D]."""
        tokens, group = self.block.tokens, self.group
        rows = [
            jnp.concatenate([head[t * group : (t + 1) * group] for head in out])
            for t in range(tokens)
        ]
        scratch.heads[pl.ds(s * tokens, tokens), :, : out.shape[-1]] = jnp.stack(rows)
