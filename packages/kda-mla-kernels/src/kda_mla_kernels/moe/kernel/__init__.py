"""The routed experts in a kernel: packed shares, scaled products, routing, the stage."""

from kda_mla_kernels.moe.kernel.packing import PackedMatrix
from kda_mla_kernels.moe.kernel.shape import ExpertImages, ExpertShape
from kda_mla_kernels.moe.kernel.stage import RoutedExperts, RoutedExpertsScratch

__all__ = [
    "ExpertImages",
    "ExpertShape",
    "PackedMatrix",
    "RoutedExperts",
    "RoutedExpertsScratch",
]
