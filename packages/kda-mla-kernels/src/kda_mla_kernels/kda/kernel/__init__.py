"""Kimi delta attention inside a TPU kernel: a decode stage that reads, and a commit that writes.

Both are those of ``delta.kernel``, with this layer's gates, its decay per key channel and its norm.
"""

from kda_mla_kernels.delta.kernel import Replay, commit_states
from kda_mla_kernels.kda.kernel.shape import KdaMemory, KdaShape, KdaVectors
from kda_mla_kernels.kda.kernel.stage import KdaProjected, KimiDeltaAttention

__all__ = [
    "KdaMemory",
    "KdaProjected",
    "KdaShape",
    "KdaVectors",
    "KimiDeltaAttention",
    "Replay",
    "commit_states",
]
