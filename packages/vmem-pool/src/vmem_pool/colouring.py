"""Offsets for blocks that may share bytes when their lifetimes do not meet.

This is dynamic storage allocation: optimal only for equal sizes, NP-hard otherwise, and easy at the
scale of a kernel. First fit in a few well-known orders is within one or two per cent of the lower
bound on average; a fixed number of shuffles of the best order removes most of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Block", "peak", "place"]

SHUFFLES = 100
"""Random orders tried when the sorted ones miss the bound."""


@dataclass(frozen=True)
class Block:
    """``size`` in any unit; bit p of ``phases`` is set if the block lives in phase p."""

    size: int
    phases: int


def peak(blocks: Sequence[Block]) -> int:
    """The lower bound of every placement: the most that lives at once."""
    width = max((block.phases.bit_length() for block in blocks), default=0)
    return max(
        (sum(block.size for block in blocks if block.phases >> p & 1) for p in range(width)),
        default=0,
    )


def place(blocks: Sequence[Block]) -> list[int]:
    """Offsets with a small total, from 0; the same blocks always give the same offsets."""
    bound = peak(blocks)
    best: list[int] = []
    lowest: int | None = None
    for order in _orders(blocks):
        offsets = _first_fit(blocks, order)
        total = max((at + block.size for at, block in zip(offsets, blocks)), default=0)
        if lowest is None or total < lowest:
            best, lowest = offsets, total
        if lowest == bound:
            break
    return best


def _orders(blocks: Sequence[Block]) -> Iterator[list[int]]:
    index = range(len(blocks))
    size = [block.size for block in blocks]
    span = [block.phases.bit_count() for block in blocks]
    yield sorted(index, key=lambda i: (-size[i], -span[i], i))
    yield sorted(index, key=lambda i: (-size[i] * span[i], i))
    yield sorted(index, key=lambda i: (-span[i], -size[i], i))
    random = np.random.default_rng(0)
    for _ in range(SHUFFLES):
        # Noise on the size keeps large blocks early, which uniform shuffles would not.
        noise = random.uniform(0.3, 1.0, len(blocks))
        yield sorted(index, key=lambda i: (-size[i] * noise[i], i))


def _first_fit(blocks: Sequence[Block], order: Sequence[int]) -> list[int]:
    offsets = [0] * len(blocks)
    placed: list[int] = []
    for i in order:
        taken = sorted(
            (offsets[j], offsets[j] + blocks[j].size)
            for j in placed
            if blocks[j].phases & blocks[i].phases
        )
        at = 0
        for start, end in taken:
            if start - at >= blocks[i].size:
                break
            at = max(at, end)
        offsets[i] = at
        placed.append(i)
    return offsets
