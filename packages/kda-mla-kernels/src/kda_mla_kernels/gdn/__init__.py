"""Gated delta net: short convolution, gates, the delta rule one token at a time and in chunks."""

from kda_mla_kernels.gdn.chunked import chunked_delta_rule
from kda_mla_kernels.gdn.reference import (
    DeltaStep,
    GdnInputs,
    causal_convolution,
    convolve,
    delta_rule,
    gates,
    mask_tokens,
    recur,
    replay,
    split_heads,
    token_windows,
)

__all__ = [
    "DeltaStep",
    "GdnInputs",
    "causal_convolution",
    "chunked_delta_rule",
    "convolve",
    "delta_rule",
    "gates",
    "mask_tokens",
    "recur",
    "replay",
    "split_heads",
    "token_windows",
]
