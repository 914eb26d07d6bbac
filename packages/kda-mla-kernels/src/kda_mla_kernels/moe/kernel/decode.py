"""Experts taken out of a kernel's images again, for XLA programs that share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kda_mla_kernels.moe.kernel.packing import LANES, PackedMatrix
from kda_mla_kernels.moe.kernel.scaled_dot import decode_scales
from kda_mla_kernels.moe.kernel.shape import ExpertImages, ExpertShape
from kda_mla_kernels.moe.packed import decoded_at_once
from kda_mla_kernels.quant.mxfp4 import nibble_values

__all__ = ["ImagedExperts"]


@dataclass(frozen=True)
class ImagedExperts:
    """One layer's experts, left in the images of all layers (implements ``moe.Packed``)."""

    shape: ExpertShape
    images: ExpertImages
    layer: Any

    @property
    def experts(self) -> int:
        """E."""
        return self.shape.experts

    @property
    def at_once(self) -> int:
        """Experts to decode at a time."""
        return decoded_at_once(self.experts, self.shape.channels, self.shape.latent)

    def decoded(self, experts: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Some experts i32 [B]: gate and up [B, 2F, C], down [B, F, C]; the inputs of each evens
        first."""
        found: ExpertImages = jax.tree.map(lambda x: x[self.layer, experts], self.images)
        upper = self.shape.gate_up.scale_rows
        lower = upper + self.shape.down.scale_rows
        gate_up = _decoded(self.shape.gate_up, found.gate_up, found.scales[:, :upper])
        down = _decoded(self.shape.down, found.down, found.scales[:, upper:lower])
        return jnp.swapaxes(gate_up, 1, 2).astype(dtype), down.astype(dtype)


def _decoded(matrix: PackedMatrix, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """f32 [B, K, N], inputs evens first."""
    rows = _scale_rows(matrix, scales)
    if matrix.code_bits == 8:
        values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        halves = [values[:, 0::2], values[:, 1::2]]
    else:
        halves = [nibble_values(half) for half in (codes & 0xF, codes >> 4)]
    powers = jnp.repeat(rows, matrix.group // 2, axis=1)
    parts = [_unfolded(matrix, half * powers) for half in halves]
    return jnp.concatenate(parts, axis=1)


def _scale_rows(matrix: PackedMatrix, scales: jax.Array) -> jax.Array:
    """f32 [B, K'/G, N'] from [B, scale rows, 128]."""
    shape = (-1, matrix.width // LANES, matrix.tiles, matrix.block, LANES)
    panels = decode_scales(scales).reshape(shape)[:, :, :, : matrix.groups]
    return jnp.moveaxis(panels, 1, 3).reshape(len(scales), -1, matrix.width)


def _unfolded(matrix: PackedMatrix, packed: jax.Array) -> jax.Array:
    """[B, K'/2, N'] -> [B, K/2, N]."""
    sides = jnp.split(packed, matrix.fold, axis=2)
    upright = jnp.concatenate(sides, axis=1)
    return jnp.concatenate(jnp.split(upright, matrix.stack, axis=1), axis=2)
