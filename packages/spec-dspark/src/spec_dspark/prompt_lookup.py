"""A drafter without weights: what followed the last time these tokens stood here?

Answers often repeat their prompt (summaries, edits, code). The last few tokens are looked up in the
row's own tokens, longest run first and latest place first, and what stood after them is proposed.
The idea is known as prompt lookup decoding (Saxena, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from kda_mla_kernels.sampling import Sampling

from spec_dspark.drafter import Proposal

__all__ = ["PromptLookup", "find_continuation"]


def find_continuation(
    tokens: Sequence[int], longest: int, shortest: int, num_drafts: int
) -> list[int]:
    """What followed the latest earlier place of the longest run that ends ``tokens``.

    Returns:
        Up to ``num_drafts`` tokens; none if no run of ``shortest`` tokens or more occurs earlier.
    """
    ids = np.asarray(tokens, np.int64)
    for length in range(min(longest, len(ids) - 1), shortest - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], length)
        places = np.flatnonzero((windows == ids[-length:]).all(axis=1))
        if places.size:
            start = int(places[-1]) + length
            return [int(token) for token in ids[start : start + num_drafts]]
    return []


class PromptLookup:
    """Copies from a row's own past. Implements :class:`spec_dspark.drafter.Drafter`.

    Args:
        max_drafts: most drafts per sequence.
        longest: longest run of tokens that is looked up.
        shortest: shortest run that is worth a guess.

    Raises:
        ValueError: counts below 1, or ``shortest`` above ``longest``.
    """

    def __init__(self, max_drafts: int = 7, longest: int = 4, shortest: int = 2) -> None:
        if max_drafts < 1:
            raise ValueError(f"max_drafts must be at least 1, not {max_drafts}")
        if not 1 <= shortest <= longest:
            raise ValueError(f"runs of {shortest} to {longest} tokens cannot be looked up")
        self.max_drafts = max_drafts
        self._lengths = (longest, shortest)
        self._tokens: dict[int, list[int]] = {}

    def reset(self, row: int) -> None:
        """Forgets a row."""
        self._tokens.pop(row, None)

    def extend(self, row: int, tokens: Sequence[int], features: jax.Array) -> None:
        """Remembers the tokens; the features are not needed."""
        self._tokens.setdefault(row, []).extend(tokens)

    def propose(
        self,
        rows: Sequence[int],
        anchors: Sequence[int],
        sampling: Sampling,
        num_drafts: int,
    ) -> Proposal:
        """Copies what followed the same tokens, without chance."""
        drafts = np.full((len(rows), num_drafts), -1, np.int32)
        for sequence, (row, anchor) in enumerate(zip(rows, anchors)):
            past = [*self._tokens.get(row, ()), anchor]
            found = find_continuation(past, *self._lengths, num_drafts)
            drafts[sequence, : len(found)] = found
        return Proposal(drafts)
