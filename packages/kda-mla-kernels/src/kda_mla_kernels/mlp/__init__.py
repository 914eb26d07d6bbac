"""Gated feed-forward layers."""

from kda_mla_kernels.mlp.reference import situ, swiglu

__all__ = ["situ", "swiglu"]
