"""The gated delta net inside a TPU kernel: a decode stage that reads, and a commit that writes.

Both are those of ``delta.kernel``, with this layer's gates, its decay per head and its norm.
"""

from kda_mla_kernels.delta.kernel import Replay, commit_states
from kda_mla_kernels.gdn.kernel.shape import GdnMemory, GdnShape, GdnVectors
from kda_mla_kernels.gdn.kernel.stage import DeltaNet

__all__ = ["DeltaNet", "GdnMemory", "GdnShape", "GdnVectors", "Replay", "commit_states"]
