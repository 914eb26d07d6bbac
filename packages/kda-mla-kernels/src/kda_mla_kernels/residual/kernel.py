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

from kda_mla_kernels.block import Block, by_sublanes
from kda_mla_kernels.numerics import Numerics

__all__ = ["Residual", "ResidualScratch"]

LANES = 128


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

    def mix(self, scratch: ResidualScratch, finished: Any, vector: jax.Array) -> jax.Array:
        """The mixture of the finished blocks and of the prefix, as :func:`~..residual.mix`.

        Args:
            finished: i32, blocks that are finished; 0 gives the prefix itself.
            vector: f32 [1, D], see :func:`~kda_mla_kernels.residual.fold`.

        Returns:
            [P, D] in the activation dtype.
        """
        prefix = scratch.prefix[...].astype(jnp.float32)
        own = _dot(prefix, vector) * self._unit(prefix)

        def larger(block: jax.Array, top: jax.Array) -> jax.Array:
            return jnp.maximum(top, self._score(scratch, block, vector))

        top = lax.fori_loop(0, finished, larger, own)

        def add(block: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
            total, mass = carry
            share = jnp.exp(self._score(scratch, block, vector) - top)
            return total + share * scratch.blocks[block].astype(jnp.float32), mass + share

        share = jnp.exp(own - top)
        zero = jnp.zeros_like(prefix)
        total, mass = lax.fori_loop(0, finished, add, (zero, jnp.zeros_like(share)))
        return self.numerics.round((total + share * prefix) / (mass + share))

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

    def _score(self, scratch: ResidualScratch, block: Any, vector: jax.Array) -> jax.Array:
        wide = scratch.blocks[block].astype(jnp.float32)
        return _dot(wide, vector) * scratch.scales[block][:, :1]

    def _unit(self, x: jax.Array) -> jax.Array:
        """f32 [P, 1], the factor that gives rows a mean square of one."""
        mean = by_sublanes(lambda rows: jnp.mean(rows * rows, axis=-1, keepdims=True), x)
        return lax.rsqrt(mean + self.eps)


def _dot(x: jax.Array, vector: jax.Array) -> jax.Array:
    """f32 [P, 1]"""
    return by_sublanes(lambda rows: jnp.sum(rows * vector, axis=-1, keepdims=True), x)
