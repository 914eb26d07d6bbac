"""How one expert's share lies in memory: packed matrices that fill lanes and contraction tiles.

A matrix unit wants [K, N] with N in whole tiles of 128 lanes and K deep. A narrow share of an
expert has neither, so a matrix may be **folded** (its K halves side by side: N doubles) or
**stacked** (its N halves on top of each other: K doubles). Either way no byte is padding.

Letters: K inputs, N outputs, G inputs of one scale; K', N' after folding or stacking; T tiles of
d inputs along K'; B rows of a tile's left operand that belong to one input row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kda_mla_kernels.quant.mxfp4 import GROUP

__all__ = ["LANES", "PackedMatrix"]

LANES = 128
SUBLANES = 8
DEPTH = 256
"""Inputs that one pass of the matrix unit contracts."""


@dataclass(frozen=True)
class PackedMatrix:
    """Shapes of a quantised matrix ``y = x W`` and how its blocks are laid out.

    Attributes:
        inputs: K.
        outputs: N.
        group: G, inputs that share one scale per output: 32 (MXFP4), or 256 at most (FP8).
        code_bits: of one weight, 4 or 8.
        fold: K parts that lie side by side.
        stack: N parts that lie on top of each other.

    Raises:
        ValueError: sizes that do not divide into whole groups, or into whole tiles of lanes.
    """

    inputs: int
    outputs: int
    group: int = GROUP
    code_bits: int = 4
    fold: int = 1
    stack: int = 1

    def __post_init__(self) -> None:
        if self.inputs % (self.fold * self.group) or self.outputs % self.stack:
            raise ValueError(
                f"a matrix of {self.inputs} inputs and {self.outputs} outputs does not divide into"
                f" {self.fold} parts of whole groups of {self.group}, or {self.stack} of outputs"
            )
        if self.width % LANES:
            raise ValueError(
                f"{self.outputs} outputs of {self.inputs} inputs fill {self.width} lanes, which"
                f" must be a multiple of {LANES}"
            )

    @property
    def rows(self) -> int:
        """K'"""
        return self.inputs // self.fold * self.stack

    @property
    def width(self) -> int:
        """N'"""
        return self.outputs * self.fold // self.stack

    @cached_property
    def depth(self) -> int:
        """d: the most inputs, in whole groups and up to 256, that divide K'."""
        most = min(DEPTH, self.rows)
        return max(d for d in range(self.group, most + 1, self.group) if self.rows % d == 0)

    @property
    def tiles(self) -> int:
        """T"""
        return self.rows // self.depth

    @property
    def groups(self) -> int:
        """Scales of one output in a tile."""
        return self.depth // self.group

    @property
    def block(self) -> int:
        """B: a row of the left operand for each scale, in whole sublanes."""
        return -(-self.groups // SUBLANES) * SUBLANES

    @property
    def code_shape(self) -> tuple[int, int]:
        """u8 [K' · bits/8, N'], the codes."""
        return self.rows * self.code_bits // 8, self.width

    @property
    def scale_rows(self) -> int:
        """Rows of 128 scales, in panels of 128 outputs, each with B rows for every tile."""
        return self.width // LANES * self.tiles * self.block

    def pack_codes(self, codes: np.ndarray) -> np.ndarray:
        """Codes as a checkpoint stores them, u8 [..., N, K · bits/8], to [..., *code_shape].

        A byte of a checkpoint holds inputs 2j (low nibble) and 2j + 1, and so does one here.
        """
        return self._parts(codes)

    def pack_scales(self, scales: np.ndarray) -> np.ndarray:
        """E8M0 scales u8 [..., N, K/G] to [..., scale_rows, 128]; rows without a group are 0."""
        wide = self._parts(scales)
        lead = wide.shape[:-2]
        tiled = wide.reshape(*lead, self.tiles, self.groups, self.width // LANES, LANES)
        missing = [(0, 0)] * tiled.ndim
        missing[-3] = (0, self.block - self.groups)
        panels = np.moveaxis(np.pad(tiled, missing), -2, -4)
        return np.ascontiguousarray(panels).reshape(*lead, self.scale_rows, LANES)

    def _parts(self, array: np.ndarray) -> np.ndarray:
        """[..., N, k] to [..., k', N'], folded or stacked."""
        outputs, inputs = array.shape[-2:]
        parts = array.reshape(
            *array.shape[:-2], self.stack, outputs // self.stack, self.fold, inputs // self.fold
        )
        ordered = np.moveaxis(parts, (-4, -1, -2, -3), (-4, -3, -2, -1))
        return np.ascontiguousarray(ordered).reshape(
            *array.shape[:-2], inputs // self.fold * self.stack, outputs // self.stack * self.fold
        )
