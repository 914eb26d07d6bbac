"""Kimi delta attention: short convolution, bounded per-channel gates, and the delta rule.

``inputs`` holds the equations of the gates; the rule itself is ``delta.reference``, and
``delta.recurrent`` and ``chunked`` are the forms that programs run.
"""

from kda_mla_kernels.delta import (
    DeltaInputs,
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
from kda_mla_kernels.kda.chunked import chunked_delta_rule
from kda_mla_kernels.kda.inputs import gates, unit_heads

__all__ = [
    "DeltaInputs",
    "DeltaStep",
    "causal_convolution",
    "chunked_delta_rule",
    "convolve",
    "delta_rule",
    "gates",
    "mask_tokens",
    "recur",
    "replay",
    "sequence",
    "token_windows",
    "unit_heads",
]
