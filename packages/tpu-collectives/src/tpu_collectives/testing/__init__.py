"""Run kernels that exchange on virtual CPU devices, and find what they do wrong."""

from tpu_collectives.program import RankProgram, Run, repeated, wide_range
from tpu_collectives.testing.isolated import Outcome, run_isolated
from tpu_collectives.testing.virtual import virtual_devices

__all__ = [
    "Outcome",
    "RankProgram",
    "Run",
    "repeated",
    "run_isolated",
    "virtual_devices",
    "wide_range",
]
