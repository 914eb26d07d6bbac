"""Grouped-query attention with partial rotary embedding over a cache."""

from kda_mla_kernels.gqa.reference import KEY_BLOCK, FetchKeys, blocked_attention, plain_attention
from kda_mla_kernels.gqa.rotary import apply_rotary, rotary_angles

__all__ = [
    "KEY_BLOCK",
    "FetchKeys",
    "apply_rotary",
    "blocked_attention",
    "plain_attention",
    "rotary_angles",
]
