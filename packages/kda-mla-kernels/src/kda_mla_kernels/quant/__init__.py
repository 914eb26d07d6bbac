"""Quantised weights: MXFP4, its exact decoding, and its lossless form in block FP8."""

from kda_mla_kernels.quant.mxfp4 import (
    BlockFp8,
    Mxfp4,
    NotLosslessError,
    block_exponents,
    decode,
    decode_fp8,
    decode_halves,
    decode_jax,
    decode_scales,
    evens_first,
    to_block_fp8,
    unpack,
)

__all__ = [
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
