"""Multi-head latent attention: expanded, absorbed, in blocks, and merged from shares.

``reference`` holds the equations over expanded keys and values; ``absorbed`` and ``blocked`` are
the forms that programs run over a latent cache; ``merge`` joins what several ranks found.
"""

from kda_mla_kernels.mla.absorbed import absorb, absorbed_attention, attend
from kda_mla_kernels.mla.blocked import FetchRows, Share, attend_blocked
from kda_mla_kernels.mla.merge import Partial, finish, merge
from kda_mla_kernels.mla.reference import (
    MlaShape,
    UpProjection,
    expanded_attention,
    output_gate,
    split_up,
)

__all__ = [
    "FetchRows",
    "MlaShape",
    "Partial",
    "Share",
    "UpProjection",
    "absorb",
    "absorbed_attention",
    "attend",
    "attend_blocked",
    "expanded_attention",
    "finish",
    "merge",
    "output_gate",
    "split_up",
]
