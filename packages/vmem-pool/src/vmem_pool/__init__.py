"""VMEM planning, aliasing proofs and weight streaming for Pallas TPU kernels."""

from importlib.metadata import version as _version

from vmem_pool.buffers import Buffer, ReceiveArea
from vmem_pool.errors import ContainerError, PlanError, StreamError
from vmem_pool.packing import pack, unpack
from vmem_pool.planner import Plan, plan
from vmem_pool.plot import save_plot
from vmem_pool.report import print_plan
from vmem_pool.views import View, view

__all__ = [
    "Buffer",
    "ContainerError",
    "Plan",
    "PlanError",
    "ReceiveArea",
    "StreamError",
    "View",
    "__version__",
    "pack",
    "plan",
    "print_plan",
    "save_plot",
    "unpack",
    "view",
]

__version__ = _version("vmem-pool")
