"""MXFP4 weights: exact decoding, and a lossless conversion to block-scaled FP8.

A matrix [N, K] (out, in) is stored as two byte arrays. Byte j of a packed row holds the inputs 2j
(low nibble) and 2j+1 (high nibble); a nibble is E2M1: bit 3 the sign, the other three an index into
the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. A scale byte e is E8M0, 2^(e-127), with 255 for NaN; one
per output row and 32 consecutive inputs. A weight is its code times its scale: two significant
bits, so it is exact in bf16 wherever bf16 has normal numbers.

Source: OCP Microscaling Formats (MX) specification 1.0, sections 5.3 and 5.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

__all__ = [
    "CODES",
    "GROUP",
    "BlockFp8",
    "Mxfp4",
    "NotLosslessError",
    "block_exponents",
    "decode",
    "decode_fp8",
    "decode_halves",
    "decode_jax",
    "decode_scales",
    "evens_first",
    "to_block_fp8",
    "unpack",
]

GROUP = 32
"""Inputs that share one scale."""

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
CODES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
"""f32 [16], the value of each nibble. Entry 8 is -0."""

_BIAS = 127
_NAN_SCALE = 255
# Between these scale bytes every non-zero weight (0.5 to 6 times the scale) is a normal number of
# bf16 and f32, which share one exponent range: 2^-126 <= 0.5 * 2^(e-127), 6 * 2^(e-127) < 2^128.
_LOWEST_EXACT_SCALE = 2
_HIGHEST_EXACT_SCALE = 252
# The largest code is 6 and e4m3 ends at 448: 6 * 2^6 = 384 is the most head room that fits.
_FP8_HEAD_ROOM = 6


class NotLosslessError(ValueError):
    """A block's scales lie too far apart for one shared exponent, so FP8 would round weights."""


@dataclass(frozen=True)
class Mxfp4:
    """One matrix [..., N, K], or a stack of them, as a checkpoint stores it.

    Raises:
        ValueError: an array is not uint8, the shapes do not belong together, or K is not a
            multiple of 32.
    """

    packed: np.ndarray
    """u8 [..., N, K/2]"""
    scales: np.ndarray
    """u8 [..., N, K/32]"""

    def __post_init__(self) -> None:
        for name, array in (("packed", self.packed), ("scales", self.scales)):
            if array.dtype != np.uint8:
                raise ValueError(f"MXFP4 {name} must be uint8, not {array.dtype}")
            if array.ndim < 2:
                raise ValueError(f"MXFP4 {name} must be [..., N, K], not of shape {array.shape}")
        inputs = self.packed.shape[-1] * 2
        if inputs == 0 or inputs % GROUP:
            raise ValueError(
                f"MXFP4 rows must hold a multiple of {GROUP} inputs, not {inputs}"
                f" (packed shape {self.packed.shape})"
            )
        expected = (*self.packed.shape[:-1], inputs // GROUP)
        if self.scales.shape != expected:
            raise ValueError(
                f"MXFP4 scales of packed {self.packed.shape} must have shape {expected},"
                f" not {self.scales.shape}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K] of the decoded matrix."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 2)

    @property
    def used(self) -> np.ndarray:
        """bool [..., N, K/32], whether any weight of a group is not zero."""
        groups = (self.packed & 0x77).reshape(*self.scales.shape, GROUP // 2)
        return np.asarray(groups.any(axis=-1))

    def check_exact(self, name: str = "weight") -> None:
        """Proves that decoding to bf16 or f32 rounds nothing, flushes nothing and meets no NaN.

        Scales of groups whose codes are all zero may have any value but NaN.

        Raises:
            ValueError: names the tensor, the first such scale byte and its place.
        """
        if self.scales.min() >= _LOWEST_EXACT_SCALE and self.scales.max() <= _HIGHEST_EXACT_SCALE:
            return
        used = self.used
        outside = (self.scales < _LOWEST_EXACT_SCALE) | (self.scales > _HIGHEST_EXACT_SCALE)
        bad = np.argwhere((outside & used) | (self.scales == _NAN_SCALE))
        if len(bad):
            place = tuple(int(i) for i in bad[0])
            raise ValueError(
                f"{name}: scale byte {self.scales[place]} at {place} is not exact; bytes of"
                f" non-zero groups must lie in {_LOWEST_EXACT_SCALE}..{_HIGHEST_EXACT_SCALE}"
            )


@dataclass(frozen=True)
class BlockFp8:
    """The same matrix as e4m3 values with one power-of-two scale per row and block of inputs."""

    values: np.ndarray
    """float8_e4m3fn [..., N, K]"""
    exponents: np.ndarray
    """u8 [..., N, K/block], E8M0 like the scales of MXFP4."""

    @property
    def block(self) -> int:
        """Inputs that share one exponent."""
        return self.values.shape[-1] // self.exponents.shape[-1]


def unpack(packed: np.ndarray) -> np.ndarray:
    """Nibbles in input order: u8 [..., K/2] -> u8 [..., K], each 0..15."""
    nibbles = np.stack([packed & 0xF, packed >> 4], axis=-1)
    return nibbles.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def decode_scales(scales: np.ndarray) -> np.ndarray:
    """E8M0 bytes to f32 of the same shape: 2^(e-127), subnormal for 0, NaN for 255."""
    nan = scales == _NAN_SCALE
    values = np.ldexp(np.float32(1), np.where(nan, 0, scales.astype(np.int32) - _BIAS))
    return np.where(nan, np.float32(np.nan), values)


def decode(weight: Mxfp4, dtype: DTypeLike = np.float32) -> np.ndarray:
    """Decodes on the host.

    Args:
        dtype: float32 or bfloat16. Both are exact where :meth:`Mxfp4.check_exact` passes;
            elsewhere a product follows IEEE arithmetic (subnormal, infinite, NaN).

    Returns:
        [..., N, K] of that dtype.
    """
    codes = CODES[unpack(weight.packed)].reshape(*weight.scales.shape, GROUP)
    with np.errstate(over="ignore", invalid="ignore"):
        values = codes * decode_scales(weight.scales)[..., None]
    return values.reshape(weight.shape).astype(dtype)


def decode_jax(
    packed: jax.Array, scales: jax.Array, dtype: jnp.dtype | type = jnp.bfloat16
) -> jax.Array:
    """Decodes on a device, inside or outside a compiled program.

    Subnormal products may be flushed to zero, as devices do.

    Args:
        packed: u8 [..., N, K/2].
        scales: u8 [..., N, K/32].
        dtype: of the result, float32 or bfloat16.

    Returns:
        [..., N, K].
    """
    nibbles = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    codes = nibble_values(nibbles).reshape(*scales.shape, GROUP)
    shape = (*packed.shape[:-1], packed.shape[-1] * 2)
    return (codes * _powers(scales)[..., None]).reshape(shape).astype(dtype)


def decode_halves(
    packed: jax.Array, scales: jax.Array, axis: int, dtype: jnp.dtype | type = jnp.bfloat16
) -> jax.Array:
    """As :func:`decode_jax`, with all even inputs before all odd ones.

    Nibbles of a byte need not be brought side by side, which a vector unit does slowly. What the
    weights multiply must be brought into this order by :func:`evens_first`.

    Args:
        packed, scales: as above, with the inputs along any axis.
        axis: of the inputs.

    Returns:
        ``dtype``, twice as many entries along ``axis``.
    """
    powers = jnp.repeat(_powers(scales), GROUP // 2, axis=axis)
    halves = [(nibble_values(half) * powers).astype(dtype) for half in (packed & 0xF, packed >> 4)]
    return jnp.concatenate(halves, axis=axis)


def evens_first(x: jax.Array) -> jax.Array:
    """[..., K] with entries 0, 2, 4, ... before 1, 3, 5, ..."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def nibble_values(nibbles: jax.Array) -> jax.Array:
    """f32 value of each nibble, computed: a table would be looked up entry by entry."""
    sizes = (nibbles & 7).astype(jnp.int32)
    # 0 0.5 1 1.5 and 2 3 and 4 6
    halves = jnp.where(sizes < 4, sizes, jnp.where(sizes < 6, 2 * sizes - 4, 4 * sizes - 16))
    magnitudes = halves.astype(jnp.float32) * 0.5
    return jnp.where(nibbles & 8, -magnitudes, magnitudes)


def _powers(scales: jax.Array) -> jax.Array:
    """f32 value of each scale byte: an f32 exponent field, but 0 and 255 mean other values."""
    powers = jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    powers = jnp.where(scales == 0, jnp.float32(2.0**-_BIAS), powers)
    return jnp.where(scales == _NAN_SCALE, jnp.float32(jnp.nan), powers)


def to_block_fp8(weight: Mxfp4, block: int = 256, name: str = "weight") -> BlockFp8:
    """Converts to FP8 with one exponent per ``block`` inputs, bit for bit or not at all.

    A block's exponent is its largest scale (of groups that are not all zero) less 6, so that the
    largest code becomes at most 384. A group whose scale lies s below the largest stores
    ``code * 2^(6-s)``, which e4m3 holds for every code while s <= 14; whether it holds for the
    codes that are really there is decided by decoding the result and comparing.

    Args:
        block: a multiple of 32 that divides K.
        name: of the tensor, for errors.

    Raises:
        NotLosslessError: the result would not decode to the same numbers, zeros' signs included.
        ValueError: the block does not divide K, or :meth:`Mxfp4.check_exact` refuses the tensor.
    """
    weight.check_exact(name)
    exponents = block_exponents(weight, block, name)
    blocks = (*exponents.shape, block // GROUP)
    codes = CODES[unpack(weight.packed)].reshape(*weight.scales.shape, GROUP)
    scales, used = weight.scales.reshape(blocks).astype(np.int32), weight.used.reshape(blocks)
    shifts = np.where(used, scales - exponents[..., None], 0).reshape(weight.scales.shape)
    wanted = np.ldexp(codes, shifts[..., None]).reshape(weight.shape)
    values = wanted.astype(ml_dtypes.float8_e4m3fn)
    _refuse_rounding(wanted, values, scales, used, name)
    return BlockFp8(values, exponents)


def block_exponents(weight: Mxfp4, block: int = 256, name: str = "weight") -> np.ndarray:
    """The exponents of :func:`to_block_fp8` alone, u8 [..., N, K/block], without converting codes.

    Raises:
        NotLosslessError: a block's exponent would lie below what E8M0 can express.
        ValueError: the block does not divide K.
    """
    inputs = weight.shape[-1]
    if block <= 0 or block % GROUP or inputs % block:
        raise ValueError(f"block must be a multiple of {GROUP} that divides {inputs}, not {block}")
    blocks = (*weight.scales.shape[:-1], inputs // block, block // GROUP)
    scales = weight.scales.reshape(blocks).astype(np.int32)
    highest = np.where(weight.used.reshape(blocks), scales, -1).max(axis=-1)
    exponents = np.where(highest < 0, _BIAS, highest - _FP8_HEAD_ROOM)
    if exponents.min() < 1:
        raise NotLosslessError(
            f"{name}: scale byte {int(highest[exponents < 1].min())} leaves no room for an FP8"
            f" block exponent; the largest of a block must be at least {_FP8_HEAD_ROOM + 1}"
        )
    return exponents.astype(np.uint8)


def _refuse_rounding(
    wanted: np.ndarray, values: np.ndarray, scales: np.ndarray, used: np.ndarray, name: str
) -> None:
    same = values.astype(np.float32).view(np.uint32) == wanted.view(np.uint32)
    if same.all():
        return
    place = tuple(int(i) for i in np.argwhere(~same)[0])
    at = (*place[:-1], place[-1] // (wanted.shape[-1] // scales.shape[-2]))
    spread = int(scales[at][used[at]].max() - scales[at][used[at]].min())
    raise NotLosslessError(
        f"{name}: the block of {place} is not lossless in FP8; its scale exponents lie {spread}"
        " apart (14 always fit); keep the tensor in MXFP4"
    )


def decode_fp8(weight: BlockFp8, dtype: DTypeLike = np.float32) -> np.ndarray:
    """Decodes on the host: [..., N, K] of ``dtype`` (float32 or bfloat16)."""
    values = weight.values.astype(np.float32).reshape(*weight.exponents.shape, weight.block)
    scaled = values * decode_scales(weight.exponents)[..., None]
    return scaled.reshape(weight.values.shape).astype(dtype)
