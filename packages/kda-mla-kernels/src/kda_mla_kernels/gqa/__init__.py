"""Grouped-query attention with partial rotary embedding and an output gate.

``reference`` holds the equations; ``blocked`` is the form that programs run over a cache.
"""

from kda_mla_kernels.gqa.blocked import KEY_BLOCK, FetchKeys, blocked_attention
from kda_mla_kernels.gqa.reference import output_gate, plain_attention
from kda_mla_kernels.gqa.rotary import apply_rotary, rotary_angles

__all__ = [
    "KEY_BLOCK",
    "FetchKeys",
    "apply_rotary",
    "blocked_attention",
    "output_gate",
    "plain_attention",
    "rotary_angles",
]
