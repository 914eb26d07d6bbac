"""A gated feed-forward layer over streamed weights, inside a kernel.

Letters: P padded rows, D hidden, F feed-forward width of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from vmem_pool.stream import SegmentReader, matvec

from kda_mla_kernels.block import Block
from kda_mla_kernels.mlp.reference import Activation, swiglu
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
    """``down(act(gate x, up x))``, this rank's part of the sum.

    Reads the matrices ``gate_up`` [D, 2F] and ``down`` [F, D] from a segment; products are summed
    in f32.

    Attributes:
        width: F.
        block: rows of a step.
        numerics: the policy.
        activation: of rounded gate and up; SwiGLU unless given.
        group: slots of the stream that are waited for together; more run faster in longer code.
    """

    width: int
    block: Block
    numerics: Numerics
    activation: Activation | None = None
    group: int = 2

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
        self.widen(scratch, reader, x)
        self.narrow(scratch, reader, out)

    def widen(self, scratch: FeedForwardScratch, reader: SegmentReader, x: Any) -> None:
        """The first half: gate, up and activation."""
        self._product(reader, "gate_up", x, scratch.gate_up)
        both = scratch.gate_up[...]
        gate, up = both[:, : self.width], both[:, self.width :]
        act = self.activation or partial(swiglu, numerics=self.numerics)
        scratch.hidden[...] = act(gate, up)

    def narrow(self, scratch: FeedForwardScratch, reader: SegmentReader, out: Any) -> None:
        """The second half: down."""
        self._product(reader, "down", scratch.hidden, out)

    def _product(self, reader: SegmentReader, name: str, x: Any, out: Any) -> None:
        matvec(reader, name, x, out, group=self.group, precision=self.numerics.precision)
