"""The decode kernel: a whole step in one Pallas call, and the programs around it.

Read ``step`` first; it is the model as a sequence of stages.
"""

from megakernel_qwen.kernel.plan import KernelModel, StepPlan
from megakernel_qwen.kernel.programs import KernelPrograms
from megakernel_qwen.kernel.weights import KernelWeights, load_kernel_weights

__all__ = [
    "KernelModel",
    "KernelPrograms",
    "KernelWeights",
    "StepPlan",
    "load_kernel_weights",
]
