"""Attention residual: each sublayer reads a softmax mixture of finished blocks and the prefix."""

from kda_mla_kernels.residual.reference import fold, mix, mix_scored, scores

__all__ = ["fold", "mix", "mix_scored", "scores"]
