"""The gated delta net inside a TPU kernel: a decode stage that reads, and a commit that writes.

The stage (``stage``) leaves the state alone and returns a record per token; the commit
(``commit``) applies the records of accepted tokens to the state in place. A kernel that exchanges
with other ranks would get copies of a state that it aliases; the commit exchanges nothing.
"""

from kda_mla_kernels.gdn.kernel.commit import Replay, commit_states
from kda_mla_kernels.gdn.kernel.shape import GdnMemory, GdnShape, GdnVectors
from kda_mla_kernels.gdn.kernel.stage import DeltaNet

__all__ = ["DeltaNet", "GdnMemory", "GdnShape", "GdnVectors", "Replay", "commit_states"]
