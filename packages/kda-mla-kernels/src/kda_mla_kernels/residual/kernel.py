"""The attention residual in a decode kernel: finished blocks and the prefix stay in VMEM.

Letters: P padded rows, D hidden, B blocks at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from kda_mla_kernels.block import Block, row_sums
from kda_mla_kernels.numerics import Numerics

__all__ = ["Residual", "ResidualScratch"]

LANES = 128
SUBLANES = 8
UNFINISHED = -1e30
"""Score of a block that is not there: its share becomes 0."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResidualScratch:
    """The stream between layers."""

    prefix: Any
    """[P, D] the sum inside the current block"""
    blocks: Any
    """[B, P, D] finished blocks, oldest first"""
    scales: Any
    """f32 [B, P, 128] each block row's factor to unit mean square, in every lane"""
    total: Any
    """f32 [P, D] weighted sum of the finished blocks, weights relative to ``top``"""
    top: Any
    """f32 [P, 128] largest score of a finished block"""
    mass: Any
    """f32 [P, 128] sum of the weights"""


@dataclass(frozen=True)
class Residual:
    """Reads mixtures, adds to the prefix, closes blocks.

    A mixture dots every finished block anew. Dotting a block once with all later mixing vectors
    would trade some 23,000 cycles of a 93-layer step for as many on the matrix unit.

    Attributes:
        block: rows of a step.
        hidden: D.
        blocks: B, of the whole model.
        eps: of the norm that scores have.
        numerics: rounds mixtures and sums.
    """

    block: Block
    hidden: int
    blocks: int
    eps: float
    numerics: Numerics

    def scratch(self) -> ResidualScratch:
        """An entry of ``scratch_shapes``."""
        rows, held = self.block.padded, jnp.dtype(self.numerics.activation)
        return ResidualScratch(
            prefix=pltpu.VMEM((rows, self.hidden), held),
            blocks=pltpu.VMEM((self.blocks, rows, self.hidden), held),
            scales=pltpu.VMEM((self.blocks, rows, LANES), jnp.float32),
            total=pltpu.VMEM((rows, self.hidden), jnp.float32),
            top=pltpu.VMEM((rows, LANES), jnp.float32),
            mass=pltpu.VMEM((rows, LANES), jnp.float32),
        )

    def reset(self, scratch: ResidualScratch) -> None:
        """No block and an empty prefix. What is not finished must be finite, and here is zero."""
        for ref in (scratch.prefix, scratch.blocks, scratch.scales, scratch.total, scratch.mass):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)
        scratch.top[...] = jnp.full(scratch.top.shape, UNFINISHED)

    def prepare(self, scratch: ResidualScratch, finished: Any, vector: jax.Array) -> None:
        """The finished blocks' part of the next mixture, which does not need the prefix.

        All blocks are read, also those that are not finished: one stretch of code without a branch
        takes less time than a loop over fewer.

        Args:
            finished: i32, blocks that are finished.
            vector: f32 [1, D], see :func:`~kda_mla_kernels.residual.fold`.
        """
        for rows in self._groups:
            self._prepare(scratch, finished, vector, rows)

    def _prepare(
        self, scratch: ResidualScratch, finished: Any, vector: jax.Array, rows: slice
    ) -> None:
        scores = [
            jnp.where(block < finished, self._score(scratch, block, vector, rows), UNFINISHED)
            for block in range(self.blocks)
        ]
        top = scores[0]
        for score in scores[1:]:
            top = jnp.maximum(top, score)
        shares = [
            jnp.where(block < finished, jnp.exp(score - top), 0.0)
            for block, score in enumerate(scores)
        ]
        total = sum(
            share * scratch.blocks[block, rows].astype(jnp.float32)
            for block, share in enumerate(shares)
        )
        scratch.total[rows] = jnp.asarray(total)
        scratch.top[rows] = jnp.broadcast_to(top, (SUBLANES, LANES))
        scratch.mass[rows] = jnp.broadcast_to(jnp.asarray(sum(shares)), (SUBLANES, LANES))

    def mix(self, scratch: ResidualScratch, vector: jax.Array) -> jax.Array:
        """The mixture of the blocks as prepared and of the prefix, as :func:`~..residual.mix`.

        Args:
            vector: that of :meth:`prepare`.

        Returns:
            [P, D] in the activation dtype.
        """
        parts = [self._mix(scratch, vector, rows) for rows in self._groups]
        return jnp.concatenate(parts, axis=0)

    def _mix(self, scratch: ResidualScratch, vector: jax.Array, rows: slice) -> jax.Array:
        prefix = scratch.prefix[rows].astype(jnp.float32)
        own = row_sums(prefix * vector) * self._unit(prefix)
        before = scratch.top[rows][:, :1]
        top = jnp.maximum(before, own)
        kept, share = jnp.exp(before - top), jnp.exp(own - top)
        mass = kept * scratch.mass[rows][:, :1] + share
        return self.numerics.round((kept * scratch.total[rows] + share * prefix) / mass)

    def close_block(self, scratch: ResidualScratch, index: Any) -> None:
        """Keeps the prefix as block ``index``; the next sum starts from nothing."""
        prefix = scratch.prefix[...]
        scratch.blocks[index] = prefix
        scale = self._unit(prefix.astype(jnp.float32))
        scratch.scales[index] = jnp.broadcast_to(scale, (self.block.padded, LANES))
        scratch.prefix[...] = jnp.zeros_like(prefix)

    def add(self, scratch: ResidualScratch, update: jax.Array) -> None:
        """prefix += update [P, D], one rounding."""
        past = scratch.prefix[...].astype(jnp.float32)
        scratch.prefix[...] = self.numerics.round(past + update.astype(jnp.float32))

    @property
    def _groups(self) -> list[slice]:
        """Rows that are worked on together: more would not stay in registers."""
        return [slice(at, at + SUBLANES) for at in range(0, self.block.padded, SUBLANES)]

    def _score(
        self, scratch: ResidualScratch, block: int, vector: jax.Array, rows: slice
    ) -> jax.Array:
        wide = scratch.blocks[block, rows].astype(jnp.float32)
        return row_sums(wide * vector) * scratch.scales[block, rows][:, :1]

    def _unit(self, x: jax.Array) -> jax.Array:
        """f32 [P, 1], the factor that gives rows a mean square of one."""
        return lax.rsqrt(row_sums(x * x) / self.hidden + self.eps)
