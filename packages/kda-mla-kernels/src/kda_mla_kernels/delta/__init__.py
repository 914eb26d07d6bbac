"""What linear attentions with a delta rule share: convolution, the rule, its recurrent form.

A gated delta net (``gdn``) has one decay per head, Kimi delta attention (``kda``) one per head and
key channel. Everything here takes either.
"""

from kda_mla_kernels.delta.convolution import causal_convolution, convolve, tail_rows, token_windows
from kda_mla_kernels.delta.inputs import DeltaInputs, mask_tokens
from kda_mla_kernels.delta.recurrent import DeltaStep, recur, replay
from kda_mla_kernels.delta.reference import delta_rule, sequence

__all__ = [
    "DeltaInputs",
    "DeltaStep",
    "causal_convolution",
    "convolve",
    "delta_rule",
    "mask_tokens",
    "recur",
    "replay",
    "sequence",
    "tail_rows",
    "token_windows",
]
