"""The end of a model: from logits of a shard of the vocabulary to its best token."""

from kda_mla_kernels.head.kernel import best_of_shard

__all__ = ["best_of_shard"]
