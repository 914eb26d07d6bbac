"""A gated feed-forward layer over streamed weights, inside a kernel.

Letters: P padded rows, D hidden, F feed-forward width of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from vmem_pool.stream import SegmentReader, matvec

from kda_mla_kernels.block import Block
from kda_mla_kernels.mlp.reference import swiglu
from kda_mla_kernels.numerics import Numerics

__all__ = ["FeedForward", "FeedForwardScratch"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FeedForwardScratch:
    """Scratch of :class:`FeedForward`."""

    gate_up: Any
    """[P, 2F] activation dtype"""
    hidden: Any
    """[P, F] activation dtype"""


@dataclass(frozen=True)
class FeedForward:
    """``down(silu(gate x) · up x)``, this rank's part of the sum.

    Reads the matrices ``gate_up`` [D, 2F] and ``down`` [F, D] from a segment. Rounds as
    :func:`~kda_mla_kernels.mlp.swiglu` does; products are summed in f32.
    """

    width: int
    """F"""
    block: Block
    numerics: Numerics

    def scratch(self) -> FeedForwardScratch:
        """An entry of ``scratch_shapes``."""
        rows, dtype = self.block.padded, jnp.dtype(self.numerics.activation)
        return FeedForwardScratch(
            gate_up=pltpu.VMEM((rows, 2 * self.width), dtype),
            hidden=pltpu.VMEM((rows, self.width), dtype),
        )

    def __call__(
        self, scratch: FeedForwardScratch, reader: SegmentReader, x: Any, out: Any
    ) -> None:
        """Normed rows x, a reference [P, D], to the f32 reference out [P, D]."""
        precision = self.numerics.precision
        matvec(reader, "gate_up", x, scratch.gate_up, precision=precision)
        both = scratch.gate_up[...]
        scratch.hidden[...] = swiglu(both[:, : self.width], both[:, self.width :], self.numerics)
        matvec(reader, "down", scratch.hidden, out, precision=precision)
