"""What the TPU compiler makes of a kernel, without a TPU."""

from vmem_pool.aot.inventory import Inventory, Site, take_inventory
from vmem_pool.aot.kernels import DmaSite, KernelReport
from vmem_pool.aot.loops import Loop
from vmem_pool.aot.report import CompileError, Options, Report, report
from vmem_pool.aot.show import print_report

__all__ = [
    "CompileError",
    "DmaSite",
    "Inventory",
    "KernelReport",
    "Loop",
    "Options",
    "Report",
    "Site",
    "print_report",
    "report",
    "take_inventory",
]
