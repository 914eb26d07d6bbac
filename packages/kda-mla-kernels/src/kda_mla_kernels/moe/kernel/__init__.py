"""The routed experts in a kernel: packed shares, scaled products, routing, the stage."""

from kda_mla_kernels.moe.kernel.decode import ImagedExperts
from kda_mla_kernels.moe.kernel.memory import RoutedExpertsScratch
from kda_mla_kernels.moe.kernel.packing import PackedMatrix
from kda_mla_kernels.moe.kernel.shape import ExpertForm, ExpertImages, ExpertShape
from kda_mla_kernels.moe.kernel.stage import RoutedExperts

__all__ = [
    "ExpertForm",
    "ExpertImages",
    "ExpertShape",
    "ImagedExperts",
    "PackedMatrix",
    "RoutedExperts",
    "RoutedExpertsScratch",
]
