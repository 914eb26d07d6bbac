"""Gated feed-forward layers."""

from kda_mla_kernels.mlp.reference import swiglu

__all__ = ["swiglu"]
