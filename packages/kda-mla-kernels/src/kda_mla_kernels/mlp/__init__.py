"""Gated feed-forward layers."""

from kda_mla_kernels.mlp.reference import Activation, situ, swiglu

__all__ = ["Activation", "situ", "swiglu"]
