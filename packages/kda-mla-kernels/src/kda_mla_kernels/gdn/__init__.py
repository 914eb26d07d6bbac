"""Gated delta net: short convolution, gates, and the delta rule.

``reference`` holds the equations; ``recurrent`` and ``chunked`` are the forms that programs run.
"""

from kda_mla_kernels.gdn.chunked import chunked_delta_rule
from kda_mla_kernels.gdn.convolution import causal_convolution, convolve, token_windows
from kda_mla_kernels.gdn.inputs import GdnInputs, gates, mask_tokens, split_heads
from kda_mla_kernels.gdn.recurrent import DeltaStep, recur, replay
from kda_mla_kernels.gdn.reference import delta_rule, sequence

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
