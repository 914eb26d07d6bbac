"""The routed experts of one layer in a decode kernel: an expert is read once, whoever chose it.

The stage chooses experts, and a schedule lists the routes, loads the experts and works the list
off: :class:`~.one_row.OneRow` where every route is to an expert of its own, and otherwise
:class:`~.sorted_rows.SortedRows`. An *entry* of the list is an expert applied to one row. A row's
sum adds its experts in ascending order from parts that no other row enters, so its bits are its
own.

Letters: P padded rows, C latent width, E experts of the model, k experts per row, N entries; B, d
and N' as in :mod:`~kda_mla_kernels.moe.kernel.packing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.block import Block
from kda_mla_kernels.mlp import Activation
from kda_mla_kernels.moe.kernel.memory import LIST_ROWS, LayerExperts, RoutedExpertsScratch
from kda_mla_kernels.moe.kernel.one_row import OneRow
from kda_mla_kernels.moe.kernel.products import ExpertProducts
from kda_mla_kernels.moe.kernel.routing import chosen_weights, top_k_by_digits, top_k_by_rank
from kda_mla_kernels.moe.kernel.scalars import ScalarTable
from kda_mla_kernels.moe.kernel.shape import ExpertImages, ExpertShape
from kda_mla_kernels.moe.kernel.sorted_rows import SortedRows
from kda_mla_kernels.moe.router import RouterRule
from kda_mla_kernels.numerics import Numerics

__all__ = ["RoutedExperts", "Schedule"]

ROWS_AT_ONCE = 8
"""Rows whose experts are chosen together: their candidates stay in registers."""


class Schedule(Protocol):
    """In what order entries are listed, loaded and worked on."""

    @property
    def loads(self) -> tuple[tuple[str, ...], ...]:
        """Images of an expert that are loaded and waited for together, those needed first in
        front."""

    @property
    def places(self) -> int:
        """Entries of one block of branch-free code."""

    @property
    def entries(self) -> int:
        """N, in whole blocks of code."""

    @property
    def slots(self) -> int:
        """Experts whose gate and up have room in VMEM."""

    @property
    def held_slots(self) -> int:
        """Experts whose scales and down have."""

    def start(
        self,
        scratch: RoutedExpertsScratch,
        layer: LayerExperts,
        chosen: jax.Array,
        weights: jax.Array,
        first: Any,
    ) -> None:
        """Lists the routes and starts the loads of as many experts as there are slots.

        Args:
            chosen: f32 [P, E] of 0 and 1.
            weights: f32 [P, E].
            first: i32, id of this rank's first expert.
        """

    def work(self, scratch: RoutedExpertsScratch, layer: LayerExperts) -> None:
        """Adds all entries to the sums of their rows, after :meth:`ExpertProducts.prepare`."""


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

    @cached_property
    def schedule(self) -> Schedule:
        """In what order entries are worked on."""
        if self.whole and self.block.rows == 1:
            return OneRow(self._products, self.rule.top_k)
        return SortedRows(self._products, self.rule.top_k, self.chunk, self.ahead)

    @property
    def _products(self) -> ExpertProducts:
        return ExpertProducts(self.shape, self.block, self.numerics, self.activation)

    def scratch(self) -> RoutedExpertsScratch:
        """An entry of ``scratch_shapes``."""
        shape, rows, held = self.shape, self.block.padded, jnp.dtype(self.numerics.activation)
        gate_up, down, schedule = shape.gate_up, shape.down, self.schedule
        entries, places = schedule.entries, schedule.places

        def wide(*sizes: int) -> Any:
            return pltpu.VMEM(sizes, jnp.float32)

        sizes = vars(shape.image_shapes())
        slots = {n: schedule.slots if n == "gate_up" else schedule.held_slots for n in sizes}
        return RoutedExpertsScratch(
            experts=ScalarTable.of(LIST_ROWS, entries, jnp.int32),
            entries=ScalarTable.of(LIST_ROWS, entries, jnp.int32),
            weights=ScalarTable.of(1, entries, jnp.float32),
            images=ExpertImages(
                **{n: pltpu.VMEM((slots[n], *size), jnp.uint8) for n, size in sizes.items()}
            ),
            lefts=pltpu.VMEM(
                (rows, gate_up.tiles, gate_up.fold * gate_up.block, gate_up.depth), held
            ),
            gate_up=wide(gate_up.fold, places, gate_up.width),
            inner=wide(places, down.rows),
            sums=wide(rows + 1, down.block, down.width),
            slot_sems=pltpu.SemaphoreType.DMA((len(schedule.loads), schedule.slots)),
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
            self.schedule.start(scratch, LayerExperts(images, layer), chosen, weights, first)
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
        products = self._products
        with jax.named_scope("moe_experts"):
            products.prepare(scratch, latent)
            self.schedule.work(scratch, LayerExperts(images, layer))
            return products.total(scratch)

    def _chosen(self, biased: jax.Array) -> jax.Array:
        """f32 [rows, E] of 0 and 1."""
        if self.block.rows == 1:
            return top_k_by_rank(biased, self.rule.top_k)
        parts = [
            top_k_by_digits(biased[at : at + ROWS_AT_ONCE], self.rule.top_k)
            for at in range(0, self.block.rows, ROWS_AT_ONCE)
        ]
        return jnp.concatenate(parts, axis=0)
