"""What an expert does to a row: the products of an entry, which both schedules are made of.

Letters as in :mod:`~kda_mla_kernels.moe.kernel.stage`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from kda_mla_kernels.block import Block
from kda_mla_kernels.mlp import Activation
from kda_mla_kernels.moe.kernel.memory import RoutedExpertsScratch
from kda_mla_kernels.moe.kernel.scaled_dot import block_diagonal, decode_scales, scaled_products
from kda_mla_kernels.moe.kernel.shape import ExpertShape
from kda_mla_kernels.numerics import Numerics

__all__ = ["Entry", "ExpertProducts"]


class Entry(Protocol):
    """An expert applied to a row: where the two are, as i32 scalars or Python's."""

    @property
    def number(self) -> Any:
        """Its place in the list."""

    @property
    def row(self) -> Any:
        """Its row; P for what belongs to none."""

    @property
    def slot(self) -> Any:
        """Slot of its expert's gate and up."""

    @property
    def held(self) -> Any:
        """Slot of its expert's scales and down."""


@dataclass(frozen=True)
class ExpertProducts:
    """Arithmetic of the stage. An entry has a *place* among those that are worked on together."""

    shape: ExpertShape
    block: Block
    numerics: Numerics
    activation: Activation

    def prepare(self, scratch: RoutedExpertsScratch, latent: jax.Array) -> None:
        """Left operands of all rows [P, C], and empty sums."""
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

    def gate_up(self, scratch: RoutedExpertsScratch, entry: Entry, place: int) -> None:
        """Products of gate and up with an entry's row."""
        matrix = self.shape.gate_up
        row = jnp.minimum(entry.row, self.block.rows - 1)
        lefts = [scratch.lefts[row, tile] for tile in range(matrix.tiles)]
        codes = scratch.images.gate_up.at[entry.slot]
        scales = self._scales(scratch, entry.held)[0]
        products = scaled_products(matrix, lefts, codes, scales, self.numerics)
        for part in range(matrix.fold):
            total = jnp.sum(products[part], axis=0, keepdims=True)
            scratch.gate_up[part, place : place + 1] = total

    def activate(self, scratch: RoutedExpertsScratch) -> None:
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

    def down(self, scratch: RoutedExpertsScratch, entry: Entry, place: int) -> None:
        """Adds an entry to the sum of its row."""
        matrix = self.shape.down
        row, held = entry.row, entry.held
        inner = self.numerics.round(scratch.inner[place : place + 1, :])
        lefts = [
            block_diagonal(matrix, inner[:, tile * matrix.depth : (tile + 1) * matrix.depth])
            for tile in range(matrix.tiles)
        ]
        codes, scales = scratch.images.down.at[held], self._scales(scratch, held)[1]
        (products,) = scaled_products(matrix, lefts, codes, scales, self.numerics)
        weight = scratch.weights.numbers
        scratch.sums[row] = scratch.sums[row] + weight[0, entry.number] * products

    def total(self, scratch: RoutedExpertsScratch) -> jax.Array:
        """f32 [P, C]: the groups' sums, and the stacked halves side by side."""
        matrix = self.shape.down
        each = matrix.groups // matrix.stack
        totals = scratch.sums[: self.block.padded]
        parts = [
            jnp.sum(totals[:, part * each : (part + 1) * each], axis=1)
            for part in range(matrix.stack)
        ]
        return jnp.concatenate(parts, axis=1)

    def _scales(self, scratch: RoutedExpertsScratch, slot: Any) -> tuple[jax.Array, jax.Array]:
        """Of gate and up, and of down."""
        upper, lower = self.shape.gate_up.scale_rows, self.shape.down.scale_rows
        scales = decode_scales(scratch.images.scales[slot])
        return scales[:upper], scales[upper : upper + lower]
