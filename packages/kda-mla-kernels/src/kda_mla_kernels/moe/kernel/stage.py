"""The routed experts of one layer in a decode kernel: an expert is read once, whoever chose it.

The routes of all rows form one list sorted by expert. It is worked off in chunks of entries, each
an expert applied to one row, while the experts of the next entries load. A row's sum adds its
experts in ascending order from parts that no other row enters, so its bits are its own.

Letters: P padded rows, C latent width, E experts of the model, k experts per row, N entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.block import Block
from kda_mla_kernels.mlp import Activation
from kda_mla_kernels.moe.kernel.routing import (
    chosen_weights,
    entries_of_one_row,
    sorted_entries,
    top_k_by_digits,
    top_k_by_rank,
)
from kda_mla_kernels.moe.kernel.scaled_dot import block_diagonal, decode_scales, scaled_products
from kda_mla_kernels.moe.kernel.shape import ExpertImages, ExpertShape
from kda_mla_kernels.moe.router import RouterRule
from kda_mla_kernels.numerics import Numerics

__all__ = ["RoutedExperts", "RoutedExpertsScratch"]

LANES = 128
EXPERT, ROW, ORDINAL, FIRST, WEIGHT = range(5)
"""Rows of the table of entries."""
TABLE_ROWS = 8
ROWS_AT_ONCE = 8
TOGETHER = (4, 8)
"""Entries of a single row that are waited for together, for gate and up and for down: more would
come later, and fewer leave the schedule less to fill waits with."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoutedExpertsScratch:
    """What the stage keeps while a layer lasts."""

    listed: Any
    """f32 [8, N'], VMEM: the entries, on their way to SMEM"""
    table: Any
    """f32 [8, N'], SMEM"""
    images: ExpertImages
    """u8 [slots, ...]"""
    lefts: Any
    """[P, tiles, fold·B, d] left operands of gate and up"""
    gate_up: Any
    """f32 [fold, chunk, columns]"""
    inner: Any
    """f32 [chunk, K' of down]"""
    sums: Any
    """f32 [P + 1, B, N'] of down; the last takes what belongs to no row"""
    table_sem: Any
    slot_sems: Any


@dataclass(frozen=True)
class RoutedExperts:
    """``Σ_e p_e down_e act(gate_e z, up_e z)`` over this rank's experts and channels.

    Attributes:
        shape: this rank's share.
        rule: how routes follow from scores.
        block: rows of a step.
        numerics: the policy; products are summed in f32 under both.
        activation: of rounded gate and up.
        chunk: entries of one block of branch-free code.
        ahead: entries whose loads are under way while a chunk is worked on.
        whole: whether this rank has a share of every expert of the model.
    """

    shape: ExpertShape
    rule: RouterRule
    block: Block
    numerics: Numerics
    activation: Activation
    chunk: int = 8
    ahead: int = 8
    whole: bool = False

    @cached_property
    def entries(self) -> int:
        """N, in whole chunks."""
        return -(-self.block.rows * self.rule.top_k // self.chunk) * self.chunk

    @property
    def distinct(self) -> bool:
        """Whether every entry is a route of this rank, to an expert of its own."""
        return self.whole and self.block.rows == 1

    @property
    def loads(self) -> tuple[tuple[str, ...], ...]:
        """Images of an expert that are loaded and waited for together, those needed first in front.

        Entries that may share an expert need a branch for each load, so there they are one.
        """
        first, then = ("gate_up", "scales"), ("down",)
        return (first, then) if self.distinct else (first + then,)

    @property
    def slots(self) -> int:
        """Experts in VMEM."""
        return min(self.entries, self.chunk + self.ahead)

    def scratch(self) -> RoutedExpertsScratch:
        """An entry of ``scratch_shapes``."""
        shape, rows, held = self.shape, self.block.padded, jnp.dtype(self.numerics.activation)
        gate_up, down = shape.gate_up, shape.down
        # Loads look ahead past the last entry too.
        columns = -(-(self.entries + self.slots) // LANES) * LANES

        def wide(*sizes: int) -> Any:
            return pltpu.VMEM(sizes, jnp.float32)

        images = shape.image_shapes(self.slots)
        return RoutedExpertsScratch(
            listed=wide(TABLE_ROWS, columns),
            table=pltpu.SMEM((TABLE_ROWS, columns), jnp.float32),
            images=ExpertImages(
                *(pltpu.VMEM(s, jnp.uint8) for s in (images.gate_up, images.down, images.scales))
            ),
            lefts=pltpu.VMEM(
                (rows, gate_up.tiles, gate_up.fold * gate_up.block, gate_up.depth), held
            ),
            gate_up=wide(gate_up.fold, self.chunk, gate_up.width),
            inner=wide(self.chunk, down.rows),
            sums=wide(rows + 1, down.block, down.width),
            table_sem=pltpu.SemaphoreType.DMA,
            slot_sems=pltpu.SemaphoreType.DMA((len(self.loads), self.slots)),
        )

    def start(
        self,
        scratch: RoutedExpertsScratch,
        images: ExpertImages,
        layer: Any,
        scores: jax.Array,
        bias: jax.Array,
        first: Any = 0,
    ) -> jax.Array:
        """Chooses experts and starts the loads of as many as there are slots.

        Args:
            images: HBM u8 [layers, E', ...] of the E' experts of this rank.
            layer: i32, index among layers with experts.
            scores: f32 [P, E], each in (0, 1).
            bias: f32 [1, E], only for the choice.
            first: i32, id of this rank's first expert.

        Returns:
            f32 [P, E], the weight of every expert of the model.
        """
        with jax.named_scope("moe_select"):
            biased = (scores + bias)[: self.block.rows]
            chosen = self.block.pad(self._chosen(biased))
            weights = chosen_weights(scores, chosen, self.rule)
            if self.distinct:
                self._list_one_row(scratch, chosen[:1], weights[:1])
            else:
                self._list(scratch, chosen, weights, first)
        self._load(scratch, images, layer, 0, self.slots)
        return weights

    def __call__(
        self, scratch: RoutedExpertsScratch, images: ExpertImages, layer: Any, latent: jax.Array
    ) -> jax.Array:
        """The weighted sum, after :meth:`start`.

        Args:
            latent: [P, C] in the activation dtype.

        Returns:
            f32 [P, C], this rank's part of the sum; not rounded.
        """
        with jax.named_scope("moe_experts"):
            self._prepare(scratch, latent)

            @pl.loop(0, self.entries // self.chunk)
            def _(chunk: jax.Array) -> None:
                first = chunk * self.chunk
                for places in self._groups(0):
                    self._wait(scratch, images, layer, first, places, load=0)
                    self._gate_up(scratch, first, places)
                self._activate(scratch)
                for places in self._groups(1):
                    if self.distinct:
                        self._wait(scratch, images, layer, first, places, load=1)
                    self._down(scratch, first, places)
                if self.slots < self.entries:
                    self._load(scratch, images, layer, first + self.slots, self.chunk)

            return self._sum(scratch)

    def _groups(self, load: int) -> list[range]:
        """Places of a chunk whose loads are waited for before any of them is worked on."""
        size = min(TOGETHER[load], self.chunk) if self.distinct else self.chunk
        return [range(at, min(at + size, self.chunk)) for at in range(0, self.chunk, size)]

    def _chosen(self, biased: jax.Array) -> jax.Array:
        """f32 [M, E] of 0 and 1."""
        if self.block.rows == 1:
            return top_k_by_rank(biased, self.rule.top_k)
        # A few rows at a time, whose candidates stay in registers.
        parts = [
            top_k_by_digits(biased[at : at + ROWS_AT_ONCE], self.rule.top_k)
            for at in range(0, self.block.rows, ROWS_AT_ONCE)
        ]
        return jnp.concatenate(parts, axis=0)

    def _list_one_row(
        self, scratch: RoutedExpertsScratch, chosen: jax.Array, weights: jax.Array
    ) -> None:
        """Writes experts and weights to SMEM; the rest of the table follows from the place."""
        experts, shares = entries_of_one_row(chosen, weights, self.entries)
        scratch.listed[EXPERT : EXPERT + 1, : self.entries] = experts
        scratch.listed[WEIGHT : WEIGHT + 1, : self.entries] = shares
        self._send_list(scratch)

    def _list(
        self, scratch: RoutedExpertsScratch, chosen: jax.Array, weights: jax.Array, first: Any
    ) -> None:
        """Writes the table of entries to SMEM."""
        held = self.shape.experts
        if held < chosen.shape[1]:
            column = lax.broadcasted_iota(jnp.int32, chosen.shape, 1)
            mine = (column >= first) & (column < first + held)
            chosen = jnp.where(mine, chosen, 0.0)
        found = sorted_entries(chosen, weights, self.entries)
        experts = jnp.maximum(found.experts - jnp.asarray(first, jnp.float32), 0.0)
        columns = [experts, found.rows, found.ordinals, found.firsts, found.weights]
        empty = [jnp.zeros_like(experts)] * (LANES - len(columns))
        by_entry = jnp.concatenate([*columns, *empty], axis=1)
        missing = scratch.listed.shape[1] - self.entries
        padded = jnp.concatenate([by_entry, jnp.zeros((missing, LANES), jnp.float32)], axis=0)
        scratch.listed[...] = padded.T[:TABLE_ROWS]
        self._send_list(scratch)

    def _send_list(self, scratch: RoutedExpertsScratch) -> None:
        copy = pltpu.make_async_copy(scratch.listed, scratch.table, scratch.table_sem)
        copy.start()
        copy.wait()

    def _entry(self, scratch: RoutedExpertsScratch, field: int, entry: Any) -> jax.Array:
        return scratch.table[field, entry].astype(jnp.int32)

    def _slot(self, scratch: RoutedExpertsScratch, entry: Any) -> jax.Array:
        ordinal = entry if self.distinct else self._entry(scratch, ORDINAL, entry)
        return lax.rem(jnp.int32(ordinal), jnp.int32(self.slots))

    def _row(self, scratch: RoutedExpertsScratch, entry: Any) -> Any:
        """The entry's row; P for what belongs to none."""
        return 0 if self.distinct else self._entry(scratch, ROW, entry)

    def _copies(
        self, scratch: RoutedExpertsScratch, images: ExpertImages, layer: Any, entry: Any, load: int
    ) -> list[Any]:
        expert = self._entry(scratch, EXPERT, entry)
        slot = self._slot(scratch, entry)
        sem = scratch.slot_sems.at[load, slot]
        return [
            pltpu.make_async_copy(
                getattr(images, name).at[layer, expert], getattr(scratch.images, name).at[slot], sem
            )
            for name in self.loads[load]
        ]

    def _each_first(self, scratch: Any, start: Any, count: int, act: Any) -> None:
        """``act(entry)`` for each of some entries that is its expert's first."""

        for entry in (start + at for at in range(count)):
            if self.distinct:
                act(entry)
            else:
                first = self._entry(scratch, FIRST, entry) == 1
                pl.when(first)(partial(act, entry))

    def _load(self, scratch: Any, images: ExpertImages, layer: Any, start: Any, count: int) -> None:
        def begin(load: int, entry: Any) -> None:
            for copy in self._copies(scratch, images, layer, entry, load):
                copy.start()

        for at in range(0, count, self.chunk):
            for load in range(len(self.loads)):
                size = min(self.chunk, count - at)
                self._each_first(scratch, start + at, size, partial(begin, load))

    def _wait(
        self,
        scratch: Any,
        images: ExpertImages,
        layer: Any,
        first: Any,
        places: range,
        *,
        load: int,
    ) -> None:
        def wait(entry: Any) -> None:
            for copy in self._copies(scratch, images, layer, entry, load):
                copy.wait()

        self._each_first(scratch, first + places.start, len(places), wait)

    def _prepare(self, scratch: RoutedExpertsScratch, latent: jax.Array) -> None:
        """Left operands of all rows, and empty sums."""
        matrix = self.shape.gate_up
        scratch.sums[...] = jnp.zeros(scratch.sums.shape, jnp.float32)
        for row in range(self.block.rows):
            for tile in range(matrix.tiles):
                starts = [part * matrix.rows + tile * matrix.depth for part in range(matrix.fold)]
                scratch.lefts[row, tile] = jnp.concatenate(
                    [
                        block_diagonal(matrix, latent[row : row + 1, at : at + matrix.depth])
                        for at in starts
                    ],
                    axis=0,
                )

    def _scales(self, scratch: RoutedExpertsScratch, slot: Any) -> tuple[jax.Array, jax.Array]:
        """Of gate and up, and of down."""
        upper, lower = self.shape.gate_up.scale_rows, self.shape.down.scale_rows
        scales = decode_scales(scratch.images.scales[slot])
        return scales[:upper], scales[upper : upper + lower]

    def _gate_up(self, scratch: RoutedExpertsScratch, first: Any, places: range) -> None:
        """Products of some entries of the chunk that begins with entry ``first``."""
        matrix = self.shape.gate_up
        for at in places:
            entry = first + at
            slot = self._slot(scratch, entry)
            row = jnp.minimum(self._row(scratch, entry), self.block.rows - 1)
            lefts = [scratch.lefts[row, tile] for tile in range(matrix.tiles)]
            codes = scratch.images.gate_up.at[slot]
            products = scaled_products(
                matrix, lefts, codes, self._scales(scratch, slot)[0], self.numerics
            )
            for part in range(matrix.fold):
                scratch.gate_up[part, at : at + 1] = jnp.sum(products[part], axis=0, keepdims=True)

    def _activate(self, scratch: RoutedExpertsScratch) -> None:
        """inner = the activations of a chunk's entries."""
        matrix, width = self.shape.gate_up, 2 * self.shape.channels
        parts = [
            scratch.gate_up[part][:, part * width : (part + 1) * width]
            for part in range(matrix.fold)
        ]
        both = self.numerics.round(sum(parts[1:], parts[0]))
        channels = self.shape.channels
        inner = self.activation(both[:, :channels], both[:, channels:]).astype(jnp.float32)
        scratch.inner[...] = jnp.concatenate([inner] * self.shape.down.stack, axis=1)

    def _down(self, scratch: RoutedExpertsScratch, first: Any, places: range) -> None:
        """Adds some entries of the chunk of entry ``first`` to their rows, in order."""
        matrix = self.shape.down
        for at in places:
            entry = first + at
            slot = self._slot(scratch, entry)
            row = self._row(scratch, entry)
            inner = self.numerics.round(scratch.inner[at : at + 1, :])
            lefts = [
                block_diagonal(matrix, inner[:, tile * matrix.depth : (tile + 1) * matrix.depth])
                for tile in range(matrix.tiles)
            ]
            codes = scratch.images.down.at[slot]
            (products,) = scaled_products(
                matrix, lefts, codes, self._scales(scratch, slot)[1], self.numerics
            )
            weight = scratch.table[WEIGHT, entry]
            scratch.sums[row] = scratch.sums[row] + weight * products

    def _sum(self, scratch: RoutedExpertsScratch) -> jax.Array:
        """f32 [P, C]: the groups' sums, and the stacked halves side by side."""
        matrix = self.shape.down
        each = matrix.groups // matrix.stack
        totals = scratch.sums[: self.block.padded]
        parts = [
            jnp.sum(totals[:, part * each : (part + 1) * each], axis=1)
            for part in range(matrix.stack)
        ]
        return jnp.concatenate(parts, axis=1)
