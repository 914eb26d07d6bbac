"""One rank's share of the routed experts: widths, packing, and the arrays that hold it.

Letters: C latent width, F channels of an expert on this rank, E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np

from kda_mla_kernels.moe.kernel.packing import LANES, PackedMatrix
from kda_mla_kernels.quant.mxfp4 import GROUP, Mxfp4, block_exponents, to_block_fp8

__all__ = ["ExpertForm", "ExpertImages", "ExpertShape"]

ExpertForm: TypeAlias = Literal["mxfp4", "fp8"]
"""What gate and up are held as."""

BYTE_ROWS = 32
"""Rows of a tile of bytes."""
FP8_BLOCK = 256
"""Inputs that share an FP8 block's exponent, at most."""
_GATE_UP = "experts' gate and up"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertImages:
    """Arrays of packed experts: [layers, E, ...] in HBM, [slots, ...] in VMEM."""

    gate_up: Any
    """u8 [..., rows, columns], codes of gate, then up"""
    down: Any
    """u8 [..., rows, columns], codes"""
    scales: Any
    """u8 [..., scale rows, 128], of gate and up, then of down"""


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of an expert's share.

    Attributes:
        latent: C, inputs of gate and up, outputs of down; a multiple of 128.
        channels: F, outputs of gate and of up on this rank; a multiple of 32.
        experts: E.
        form: ``mxfp4``, or lossless block FP8, twice the bytes; down is MXFP4 in both.

    Raises:
        ValueError: widths that do not divide into whole groups and lanes.
    """

    latent: int
    channels: int
    experts: int
    form: ExpertForm = "mxfp4"

    def __post_init__(self) -> None:
        if self.form not in get_args(ExpertForm):
            raise ValueError(f"experts are held as mxfp4 or fp8, not as {self.form!r}")
        if self.channels % GROUP or self.latent % LANES:
            raise ValueError(
                f"an expert share of {self.channels} channels on a latent of {self.latent}:"
                f" channels must be a multiple of {GROUP}, the latent one of {LANES}"
            )

    @cached_property
    def gate_up(self) -> PackedMatrix:
        """[C, 2F]: gate, then up, folded until the lanes are full."""
        fold = LANES // gcd(LANES, 2 * self.channels)
        if self.form == "mxfp4":
            return PackedMatrix(self.latent, 2 * self.channels, fold=fold)
        block = gcd(FP8_BLOCK, self.latent // fold)
        return PackedMatrix(self.latent, 2 * self.channels, block, 8, fold=fold)

    @cached_property
    def down(self) -> PackedMatrix:
        """[F, C], stacked if its bytes would not fill whole tiles otherwise."""
        partial = self.channels // 2 % BYTE_ROWS and self.latent % (2 * LANES) == 0
        return PackedMatrix(self.channels, self.latent, stack=2 if partial else 1)

    @property
    def scale_rows(self) -> int:
        """Rows of 128 scales of one expert, in whole tiles."""
        rows = self.gate_up.scale_rows + self.down.scale_rows
        return -(-rows // BYTE_ROWS) * BYTE_ROWS

    def image_shapes(self, *lead: int) -> ExpertImages:
        """Shapes of the arrays behind the given leading sizes."""
        return ExpertImages(
            gate_up=(*lead, *self.gate_up.code_shape),
            down=(*lead, *self.down.code_shape),
            scales=(*lead, self.scale_rows, LANES),
        )

    @property
    def bytes(self) -> int:
        """Of one expert's share."""
        shapes = self.image_shapes()
        return sum(int(np.prod(s)) for s in (shapes.gate_up, shapes.down, shapes.scales))

    def pack(self, gate: Mxfp4, up: Mxfp4, down: Mxfp4) -> ExpertImages:
        """Packs experts, one or a stack of them.

        Args:
            gate, up: [..., F, C], this rank's channels. down: [..., C, F].

        Raises:
            NotLosslessError: FP8 would round a weight.
        """
        return ExpertImages(
            gate_up=self.pack_gate_up(gate, up),
            down=self.pack_down(down),
            scales=self.pack_scales(self.gate_up_scales(gate, up), down.scales),
        )

    # The parts of the above, for those who hold one at a time.

    def pack_gate_up(self, gate: Mxfp4, up: Mxfp4, name: str = _GATE_UP) -> np.ndarray:
        """Codes of gate and up, u8 [..., rows, columns].

        Raises:
            NotLosslessError: FP8 would round a weight; the message calls the matrix ``name``.
        """
        both = _joined(gate, up)
        if self.form == "mxfp4":
            return self.gate_up.pack_codes(both.packed)
        values = to_block_fp8(both, self.gate_up.group, name).values
        return self.gate_up.pack_codes(values.view(np.uint8))

    def pack_down(self, down: Mxfp4) -> np.ndarray:
        """Codes of down, u8 [..., rows, columns]."""
        return self.down.pack_codes(down.packed)

    def gate_up_scales(self, gate: Mxfp4, up: Mxfp4, name: str = _GATE_UP) -> np.ndarray:
        """Scales of gate and up in this form, u8 [..., 2F, C / group].

        Raises:
            NotLosslessError: no FP8 exponent is low enough for a block.
        """
        both = _joined(gate, up)
        if self.form == "mxfp4":
            return both.scales
        return block_exponents(both, self.gate_up.group, name)

    def pack_scales(self, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
        """All scales, u8 [..., scale rows, 128].

        Args:
            gate_up: of :meth:`gate_up_scales`. down: as stored, [..., C, F/32].
        """
        rows = [self.gate_up.pack_scales(gate_up), self.down.pack_scales(down)]
        return _stacked(rows, self.scale_rows)


def _joined(gate: Mxfp4, up: Mxfp4) -> Mxfp4:
    return Mxfp4(
        np.concatenate([gate.packed, up.packed], axis=-2),
        np.concatenate([gate.scales, up.scales], axis=-2),
    )


def _stacked(parts: Sequence[np.ndarray], rows: int) -> np.ndarray:
    lead = parts[0].shape[:-2]
    missing = rows - sum(part.shape[-2] for part in parts)
    return np.concatenate([*parts, np.zeros((*lead, missing, LANES), np.uint8)], axis=-2)
