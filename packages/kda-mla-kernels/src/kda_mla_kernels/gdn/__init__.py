"""Gated delta net: short convolution, gates, and the delta rule.

The rule itself, its recurrent form and the convolution are those of ``delta``, shared with ``kda``.
"""

from kda_mla_kernels.delta import (
    DeltaStep,
    causal_convolution,
    convolve,
    delta_rule,
    mask_tokens,
    recur,
    replay,
    sequence,
    token_windows,
)
from kda_mla_kernels.gdn.chunked import chunked_delta_rule
from kda_mla_kernels.gdn.inputs import GdnInputs, gates, split_heads

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
    "sequence",
    "split_heads",
    "token_windows",
]
