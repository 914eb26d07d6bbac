"""RMS norms: plain, zero-centred and gated."""

from kda_mla_kernels.norm.reference import (
    gated_rms_norm,
    l2_norm,
    rms_norm,
    sigmoid_gated_rms_norm,
    stepwise_rms_norm,
)

__all__ = [
    "gated_rms_norm",
    "l2_norm",
    "rms_norm",
    "sigmoid_gated_rms_norm",
    "stepwise_rms_norm",
]
