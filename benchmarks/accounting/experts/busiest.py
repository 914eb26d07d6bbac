"""How many of the chosen experts the busiest group of ranks has, if choices are uniform."""

from __future__ import annotations

import numpy as np

__all__ = ["busiest_share"]

DRAWS = 20_000


def busiest_share(groups: int, chosen: int, experts: int, rows: int) -> float:
    """Mean number of distinct experts that the busiest of equal groups of ranks must read.

    Every rank waits for the sum over all ranks, so the busiest one sets the pace.

    Args:
        groups: of ranks, each with ``experts / groups`` experts.
        chosen: experts of a row.
        rows: that choose independently.
    """
    generator = np.random.default_rng(0)
    draws = max(1, DRAWS // rows)
    hit = np.zeros((draws, experts), bool)
    for _ in range(rows):
        order = generator.random((draws, experts)).argpartition(chosen, axis=1)[:, :chosen]
        np.put_along_axis(hit, order, True, axis=1)
    return float(hit.reshape(draws, groups, -1).sum(axis=2).max(axis=1).mean())
