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
        )

    def reset(self, scratch: ResidualScratch) -> None:
        """No block and an empty prefix. What is not finished must be finite, and here is zero."""
        for ref in (scratch.prefix, scratch.blocks, scratch.scales):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    def mix(self, scratch: ResidualScratch, finished: Any, vector: jax.Array) -> jax.Array:
        """The mixture of the finished blocks and of the prefix, as :func:`~..residual.mix`.

        All blocks are read, also those that are not finished: one stretch of code without a branch
        takes less time than a loop over fewer.

        Args:
            finished: i32, blocks that are finished; 0 gives the prefix itself.
            vector: f32 [1, D], see :func:`~kda_mla_kernels.residual.fold`.

        Returns:
            [P, D] in the activation dtype.
        """
        prefix = scratch.prefix[...].astype(jnp.float32)
        own = row_sums(prefix * vector) * self._unit(prefix)
        scores = [
            jnp.where(block < finished, self._score(scratch, block, vector), UNFINISHED)
            for block in range(self.blocks)
        ]
        top = own
        for score in scores:
            top = jnp.maximum(top, score)
        share = jnp.exp(own - top)
        total, mass = share * prefix, share
        for block, score in enumerate(scores):
            share = jnp.exp(score - top)
            total = total + share * scratch.blocks[block].astype(jnp.float32)
            mass = mass + share
        return self.numerics.round(total / mass)

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

    def _score(self, scratch: ResidualScratch, block: int, vector: jax.Array) -> jax.Array:
        wide = scratch.blocks[block].astype(jnp.float32)
        return row_sums(wide * vector) * scratch.scales[block][:, :1]

    def _unit(self, x: jax.Array) -> jax.Array:
        """f32 [P, 1], the factor that gives rows a mean square of one."""
        return lax.rsqrt(row_sums(x * x) / self.hidden + self.eps)
