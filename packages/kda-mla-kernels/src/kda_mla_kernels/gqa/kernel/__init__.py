"""Grouped-query attention as a stage of a decode kernel, and the commit of what it leaves behind.

The stage reads the cache and returns records; the commit writes the accepted ones into the cache.
"""

from kda_mla_kernels.gqa.kernel.commit import KeyValueCommit, commit_keys
from kda_mla_kernels.gqa.kernel.shape import GqaMemory, GqaShape, GqaVectors
from kda_mla_kernels.gqa.kernel.stage import Attention
from kda_mla_kernels.gqa.kernel.tiles import default_tile

__all__ = [
    "Attention",
    "GqaMemory",
    "GqaShape",
    "GqaVectors",
    "KeyValueCommit",
    "commit_keys",
    "default_tile",
]
