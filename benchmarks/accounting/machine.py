"""The constants of the prediction. They come from published measurements and are not tuned.

An exchange costs what :mod:`tpu_collectives.cost` says.
"""

from vmem_pool.aot.machine import CLOCK_GHZ

__all__ = ["CYCLES_PER_US", "HBM_BYTES_PER_US"]

CYCLES_PER_US = CLOCK_GHZ * 1e3
HBM_BYTES_PER_US = 3198e3
"""Sustained by one core of a TPU v7, in one direction or both together."""
