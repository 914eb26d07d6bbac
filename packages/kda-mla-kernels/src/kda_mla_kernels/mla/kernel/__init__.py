"""Latent attention as a stage of a decode kernel, and the commit of what it leaves behind.

The stage reads the cache and returns records; the commit writes the accepted ones into the cache.
Both work on all positions or on a rank's share of them.
"""

from kda_mla_kernels.attention.split import Split
from kda_mla_kernels.mla.kernel.commit import LatentCommit, commit_latents
from kda_mla_kernels.mla.kernel.partial import PARTIAL_LANES, merge_packed, unpack
from kda_mla_kernels.mla.kernel.shape import (
    LONGEST_TILE,
    MlaInputs,
    MlaMemory,
    default_tile,
    record_width,
)
from kda_mla_kernels.mla.kernel.stage import LatentAttention

__all__ = [
    "LONGEST_TILE",
    "PARTIAL_LANES",
    "LatentAttention",
    "LatentCommit",
    "MlaInputs",
    "MlaMemory",
    "Split",
    "commit_latents",
    "default_tile",
    "merge_packed",
    "record_width",
    "unpack",
]
