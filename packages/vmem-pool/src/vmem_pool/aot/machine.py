"""Numbers of a TPU v7 core that turn a schedule into times and limits. None was measured here."""

__all__ = ["BRANCH_DELAY", "CLOCK_GHZ", "HBM_BYTES_PER_CYCLE", "OVERLAY_BUNDLES"]

CLOCK_GHZ = 2.2
"""Published peak FLOP/s over the FLOP per cycle of the matrix units."""
HBM_BYTES_PER_CYCLE = 3198 / CLOCK_GHZ
"""From the sustained bandwidth, 3198 GB/s per core, that others measured."""
OVERLAY_BUNDLES = 21_800
"""About what the instruction memory holds; code beyond is fetched while it runs."""
BRANCH_DELAY = 6
"""Bundles that are still executed after a branch."""
