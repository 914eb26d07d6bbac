"""A delta rule inside a TPU kernel: what decode stages share, and the commit of their records.

A stage (``stage``) leaves the state alone and returns a record per token; the commit (``commit``)
applies the records of accepted tokens to the state in place. A kernel that exchanges with other
ranks would get copies of a state that it aliases; the commit exchanges nothing.

``gdn.kernel`` and ``kda.kernel`` add their gates and norms, and how a decay meets the state.
"""

from kda_mla_kernels.delta.kernel.commit import Replay, commit_states
from kda_mla_kernels.delta.kernel.shape import DeltaMemory, DeltaShape
from kda_mla_kernels.delta.kernel.stage import DeltaStage, TokenInputs

__all__ = ["DeltaMemory", "DeltaShape", "DeltaStage", "Replay", "TokenInputs", "commit_states"]
