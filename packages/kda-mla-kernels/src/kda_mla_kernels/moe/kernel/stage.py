"""The routed experts of one layer in a decode kernel: an expert is read once, whoever chose it.

The routes of all rows form one list sorted by expert. It is worked off in chunks of entries, each
an expert applied to one row, while the experts of the next entries load. A chunk's gate and up are
computed together with the down of the chunk before, so that products need not wait for one another.
A row's sum adds its experts in ascending order from parts that no other row enters, so its bits are
its own.

Letters: P padded rows, C latent width, E experts of the model, k experts per row, N entries; B, d
and N' as in :mod:`~kda_mla_kernels.moe.kernel.packing`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.block import Block
from kda_mla_kernels.mlp import Activation
from kda_mla_kernels.moe.kernel.routing import (
    Demand,
    chosen_weights,
    entries_of_one_row,
    sorted_entries,
    top_k_by_digits,
    top_k_by_rank,
)
from kda_mla_kernels.moe.kernel.scalars import ScalarTable
from kda_mla_kernels.moe.kernel.scaled_dot import block_diagonal, decode_scales, scaled_products
from kda_mla_kernels.moe.kernel.shape import ExpertImages, ExpertShape
from kda_mla_kernels.moe.router import RouterRule
from kda_mla_kernels.numerics import Numerics

__all__ = ["RoutedExperts", "RoutedExpertsScratch"]

EXPERT, SLOT_OF, HELD_OF, EXPERTS = range(4)
"""Rows of the list of experts: those that have routes, the slots of each (of gate and up, and of
what is held for longer), and how many they are."""
ROW, SLOT, HELD, SEEN = range(4)
"""Rows of the list of entries: an entry's row, its expert's slots, and how many experts it and the
entries before it have."""
LIST_ROWS = 8
"""Of both lists: whole sublanes."""
ROWS_AT_ONCE = 8
"""Rows whose experts are chosen together: their candidates stay in registers."""
TOGETHER = (4, 8)
"""Entries of a single row that are waited for together, for gate and up and for down: more would
come later, and fewer leave the schedule less to fill waits with."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoutedExpertsScratch:
    """What the stage keeps while a layer lasts."""

    experts: ScalarTable
    """i32 [8, N]"""
    entries: ScalarTable
    """i32 [8, N]"""
    weights: ScalarTable
    """f32 [1, N], of the entries"""
    images: ExpertImages
    """u8 [slots, ...] of gate and up, [held slots, ...] of the others"""
    lefts: Any
    """[P, tiles, fold·B, d] left operands of gate and up"""
    gate_up: Any
    """f32 [fold, places, columns]"""
    inner: Any
    """f32 [places, K' of down]"""
    sums: Any
    """f32 [P + 1, B, N'] of down; the last takes what belongs to no row"""
    slot_sems: Any


@dataclass(frozen=True)
class _Layer:
    """The experts of one layer in HBM."""

    images: ExpertImages
    index: Any

    def image(self, name: str, expert: Any) -> Any:
        """One image of an expert."""
        return getattr(self.images, name).at[self.index, expert]


@dataclass(frozen=True)
class RoutedExperts:
    """``Σ_e p_e down_e act(gate_e z, up_e z)`` over this rank's experts and channels.

    Attributes:
        shape: this rank's share.
        rule: how routes follow from scores.
        block: rows of a step.
        numerics: the policy; products are summed in f32 under both.
        activation: of rounded gate and up.
        chunk: entries of one block of branch-free code; a single row's are one block anyway.
        ahead: entries whose loads are under way while gate and up of a chunk are computed.
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

    @property
    def distinct(self) -> bool:
        """Whether every entry is a route of this rank, to an expert of its own."""
        return self.whole and self.block.rows == 1

    @property
    def places(self) -> int:
        """Entries of a block of code."""
        return self.rule.top_k if self.distinct else self.chunk

    @cached_property
    def entries(self) -> int:
        """N, in whole blocks of code."""
        return -(-self.block.rows * self.rule.top_k // self.places) * self.places

    @property
    def loads(self) -> tuple[tuple[str, ...], ...]:
        """Images of an expert that are loaded and waited for together, those needed first in front.

        Where entries may share an expert, loads are counted by a loop, so there they are one.
        """
        first, then = ("gate_up", "scales"), ("down",)
        return (first, then) if self.distinct else (first + then,)

    @property
    def slots(self) -> int:
        """Experts whose gate and up are in VMEM."""
        return self.entries if self.distinct else min(self.entries, self.chunk + self.ahead)

    @property
    def held_slots(self) -> int:
        """Experts whose down and scales are: a chunk more, whose down is still to come."""
        return self.slots if self.distinct else min(self.entries, self.slots + self.chunk)

    def scratch(self) -> RoutedExpertsScratch:
        """An entry of ``scratch_shapes``."""
        shape, rows, held = self.shape, self.block.padded, jnp.dtype(self.numerics.activation)
        gate_up, down = shape.gate_up, shape.down

        def wide(*sizes: int) -> Any:
            return pltpu.VMEM(sizes, jnp.float32)

        sizes = vars(shape.image_shapes())
        slots = {n: self.slots if n == "gate_up" else self.held_slots for n in sizes}
        return RoutedExpertsScratch(
            experts=ScalarTable.of(LIST_ROWS, self.entries, jnp.int32),
            entries=ScalarTable.of(LIST_ROWS, self.entries, jnp.int32),
            weights=ScalarTable.of(1, self.entries, jnp.float32),
            images=ExpertImages(
                **{n: pltpu.VMEM((slots[n], *size), jnp.uint8) for n, size in sizes.items()}
            ),
            lefts=pltpu.VMEM(
                (rows, gate_up.tiles, gate_up.fold * gate_up.block, gate_up.depth), held
            ),
            gate_up=wide(gate_up.fold, self.places, gate_up.width),
            inner=wide(self.places, down.rows),
            sums=wide(rows + 1, down.block, down.width),
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
            here = _Layer(images, layer)
            if self.distinct:
                self._list_one_row(scratch, here, chosen[:1], weights[:1])
            else:
                self._list(scratch, here, chosen, weights, first)
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
            (self._one_row if self.distinct else self._chunks)(scratch, _Layer(images, layer))
            return self._sum(scratch)

    def _one_row(self, scratch: RoutedExpertsScratch, layer: _Layer) -> None:
        """All entries of a single row, some at a time as they arrive."""
        for load, work in enumerate((self._gate_up, self._down)):
            for first in range(0, self.entries, TOGETHER[load]):
                together = range(first, min(first + TOGETHER[load], self.entries))
                self._wait(scratch, layer, together.start, together.stop, load)
                for entry in together:
                    work(scratch, entry, entry)
            if load == 0:
                self._activate(scratch)

    def _chunks(self, scratch: RoutedExpertsScratch, layer: _Layer) -> None:
        """All entries, chunk by chunk: down is a chunk behind gate and up."""
        places = range(self.chunk)
        self._wait(scratch, layer, 0, self._seen(scratch, self.chunk), 0)
        for place in places:
            self._gate_up(scratch, place, place)

        @pl.loop(1, self.entries // self.chunk)
        def _(chunk: jax.Array) -> None:
            first = chunk * self.chunk
            before, now = (self._started(scratch, at) for at in (first - self.chunk, first))
            self._load(scratch, layer, before, now, 0)
            before, now = (self._seen(scratch, at) for at in (first, first + self.chunk))
            self._wait(scratch, layer, before, now, 0)
            self._activate(scratch)
            for place in places:
                self._gate_up(scratch, first + place, place)
            for place in places:
                self._down(scratch, first - self.chunk + place, place)

        self._activate(scratch)
        for place in places:
            self._down(scratch, self.entries - self.chunk + place, place)

    def _chosen(self, biased: jax.Array) -> jax.Array:
        """f32 [rows, E] of 0 and 1."""
        if self.block.rows == 1:
            return top_k_by_rank(biased, self.rule.top_k)
        parts = [
            top_k_by_digits(biased[at : at + ROWS_AT_ONCE], self.rule.top_k)
            for at in range(0, self.block.rows, ROWS_AT_ONCE)
        ]
        return jnp.concatenate(parts, axis=0)

    def _list_one_row(
        self,
        scratch: RoutedExpertsScratch,
        layer: _Layer,
        chosen: jax.Array,
        weights: jax.Array,
    ) -> None:
        """Starts all loads and writes the entries' weights; the rest follows from the place."""
        experts, shares = entries_of_one_row(chosen, weights, self.entries)
        scratch.experts.write({EXPERT: experts})
        scratch.weights.write({0: shares})
        scratch.experts.ready()
        for load in range(len(self.loads)):
            self._load(scratch, layer, 0, self.entries, load)
        scratch.weights.ready()

    def _list(
        self,
        scratch: RoutedExpertsScratch,
        layer: _Layer,
        chosen: jax.Array,
        weights: jax.Array,
        first: Any,
    ) -> None:
        """Starts the first loads, then lists the entries."""
        held = self.shape.experts
        if held < chosen.shape[1]:
            column = lax.broadcasted_iota(jnp.int32, chosen.shape, 1)
            mine = (column >= first) & (column < first + held)
            chosen = jnp.where(mine, chosen, 0.0)
        demand = Demand.of(chosen)
        experts = demand.listed(self.entries) - jnp.asarray(first, jnp.float32)
        place = lax.broadcasted_iota(jnp.int32, (1, self.entries), 1).astype(jnp.float32)
        columns = {
            EXPERT: jnp.maximum(experts, 0.0),
            SLOT_OF: _remainders(place, self.slots),
            HELD_OF: _remainders(place, self.held_slots),
            EXPERTS: jnp.broadcast_to(demand.experts, place.shape),
        }
        scratch.experts.write(columns)
        scratch.experts.ready()
        at_first = jnp.minimum(scratch.experts.numbers[EXPERTS, 0], self.slots)
        self._load(scratch, layer, 0, at_first, 0)

        found = sorted_entries(demand, chosen, weights, self.entries)
        columns = {
            ROW: found.rows,
            SLOT: _remainders(found.seen - 1, self.slots),
            HELD: _remainders(found.seen - 1, self.held_slots),
            SEEN: found.seen,
        }
        scratch.entries.write(columns)
        scratch.weights.write({0: found.weights})
        scratch.entries.ready()
        scratch.weights.ready()

    def _slot(self, scratch: RoutedExpertsScratch, field: int, entry: Any) -> Any:
        return entry if self.distinct else scratch.entries.numbers[field, entry]

    def _row(self, scratch: RoutedExpertsScratch, entry: Any) -> Any:
        """The entry's row; P for what belongs to none."""
        return 0 if self.distinct else scratch.entries.numbers[ROW, entry]

    def _seen(self, scratch: RoutedExpertsScratch, entry: Any) -> Any:
        """Experts of the entries before this one, of which there are some."""
        return scratch.entries.numbers[SEEN, entry - 1]

    def _started(self, scratch: RoutedExpertsScratch, entry: Any) -> Any:
        """Experts whose loads are under way or done when the work on this entry begins: as many as
        there are slots, counted from its own."""
        own = self._seen(scratch, entry + 1) - 1
        return jnp.minimum(own + self.slots, scratch.experts.numbers[EXPERTS, 0])

    def _load(
        self, scratch: RoutedExpertsScratch, layer: _Layer, begin: Any, end: Any, load: int
    ) -> None:
        """Starts the loads of some experts, by their ordinals."""

        def start(ordinal: Any) -> None:
            numbers = scratch.experts.numbers
            expert, sem = numbers[EXPERT, ordinal], self._sem(scratch, ordinal, load)
            for name in self.loads[load]:
                field = SLOT_OF if name == "gate_up" else HELD_OF
                slot = ordinal if self.distinct else numbers[field, ordinal]
                here = getattr(scratch.images, name).at[slot]
                pltpu.make_async_copy(layer.image(name, expert), here, sem).start()

        self._each(begin, end, start)

    def _wait(
        self, scratch: RoutedExpertsScratch, layer: _Layer, begin: Any, end: Any, load: int
    ) -> None:
        """Waits for some experts, by their ordinals."""

        def wait(ordinal: Any) -> None:
            sem = self._sem(scratch, ordinal, load)
            for name in self.loads[load]:  # of any expert: a wait knows sizes, not places
                here = getattr(scratch.images, name).at[0]
                pltpu.make_async_copy(layer.image(name, 0), here, sem).wait()

        self._each(begin, end, wait)

    def _sem(self, scratch: RoutedExpertsScratch, ordinal: Any, load: int) -> Any:
        slot = ordinal if self.distinct else scratch.experts.numbers[SLOT_OF, ordinal]
        return scratch.slot_sems.at[load, slot]

    def _each(self, begin: Any, end: Any, act: Callable[[Any], None]) -> None:
        """``act`` of each number in a row; straight on for a single row, which knows how many."""
        if self.distinct:
            for number in range(begin, end):
                act(number)
        else:
            pl.loop(begin, end)(act)

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

    def _gate_up(self, scratch: RoutedExpertsScratch, entry: Any, place: int) -> None:
        """Products of an entry."""
        matrix = self.shape.gate_up
        row = jnp.minimum(self._row(scratch, entry), self.block.rows - 1)
        lefts = [scratch.lefts[row, tile] for tile in range(matrix.tiles)]
        codes = scratch.images.gate_up.at[self._slot(scratch, SLOT, entry)]
        scales = self._scales(scratch, self._slot(scratch, HELD, entry))[0]
        products = scaled_products(matrix, lefts, codes, scales, self.numerics)
        for part in range(matrix.fold):
            total = jnp.sum(products[part], axis=0, keepdims=True)
            scratch.gate_up[part, place : place + 1] = total

    def _activate(self, scratch: RoutedExpertsScratch) -> None:
        """inner = the activations of all places."""
        matrix, width = self.shape.gate_up, 2 * self.shape.channels
        parts = [
            scratch.gate_up[part][:, part * width : (part + 1) * width]
            for part in range(matrix.fold)
        ]
        both = self.numerics.round(sum(parts[1:], parts[0]))
        channels = self.shape.channels
        inner = self.activation(both[:, :channels], both[:, channels:]).astype(jnp.float32)
        scratch.inner[...] = jnp.concatenate([inner] * self.shape.down.stack, axis=1)

    def _down(self, scratch: RoutedExpertsScratch, entry: Any, place: int) -> None:
        """Adds an entry to its row."""
        matrix = self.shape.down
        row, held = self._row(scratch, entry), self._slot(scratch, HELD, entry)
        inner = self.numerics.round(scratch.inner[place : place + 1, :])
        lefts = [
            block_diagonal(matrix, inner[:, tile * matrix.depth : (tile + 1) * matrix.depth])
            for tile in range(matrix.tiles)
        ]
        codes, scales = scratch.images.down.at[held], self._scales(scratch, held)[1]
        (products,) = scaled_products(matrix, lefts, codes, scales, self.numerics)
        scratch.sums[row] = scratch.sums[row] + scratch.weights.numbers[0, entry] * products

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


def _remainders(numbers: jax.Array, divisor: int) -> jax.Array:
    """Of whole f32 numbers; 0 for those below 0."""
    numbers = jnp.maximum(numbers, 0.0)
    # Halves keep the quotients off their steps.
    return numbers - jnp.floor((numbers + 0.5) / divisor) * divisor
