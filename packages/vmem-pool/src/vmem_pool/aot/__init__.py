"""What the TPU compiler makes of a kernel, without a TPU."""

from vmem_pool.aot.events import Event, Semaphore, Trace, TraceError, trace_events
from vmem_pool.aot.inventory import Inventory, Site, take_inventory
from vmem_pool.aot.kernels import DmaSite, KernelReport
from vmem_pool.aot.loops import Loop
from vmem_pool.aot.report import CompileError, Options, Report, report
from vmem_pool.aot.schedule import Schedule, ScheduleError, read_schedule
from vmem_pool.aot.show import print_report
from vmem_pool.aot.ways import Segment

__all__ = [
    "CompileError",
    "DmaSite",
    "Event",
    "Inventory",
    "KernelReport",
    "Loop",
    "Options",
    "Report",
    "Schedule",
    "ScheduleError",
    "Segment",
    "Semaphore",
    "Site",
    "Trace",
    "TraceError",
    "print_report",
    "read_schedule",
    "report",
    "take_inventory",
    "trace_events",
]
