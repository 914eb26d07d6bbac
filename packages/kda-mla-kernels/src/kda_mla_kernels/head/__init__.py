"""The end of a model: from logits of a shard of the vocabulary to its best tokens."""

from kda_mla_kernels.head.kernel import (
    Candidates,
    best_of_shard,
    candidate_shapes,
    candidates_of_shard,
)

__all__ = ["Candidates", "best_of_shard", "candidate_shapes", "candidates_of_shard"]
