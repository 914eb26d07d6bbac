"""Run kernels that exchange on virtual CPU devices, and find what they do wrong."""

from tpu_collectives.program import RankProgram, Run, repeated, wide_range
from tpu_collectives.testing.compiling import quick_options
from tpu_collectives.testing.isolated import Outcome, run_isolated
from tpu_collectives.testing.virtual import virtual_devices
from tpu_collectives.watch import Watched, simulator, watch

__all__ = [
    "Outcome",
    "RankProgram",
    "Run",
    "Watched",
    "quick_options",
    "repeated",
    "run_isolated",
    "simulator",
    "virtual_devices",
    "watch",
    "wide_range",
]
