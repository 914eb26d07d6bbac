"""The protocol between a drafter and the speculative loop.

A drafter may keep something per row of the target's state (tokens, context keys, a cache). The
loop tells it what the target has consumed: :meth:`Drafter.extend` after each prefill chunk and each
round, with the target's features of exactly those tokens.

Letters: S sequences, K drafts of each, V vocabulary, F feature layers, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from kda_mla_kernels.sampling import Sampling

__all__ = ["Drafter", "Proposal"]


@dataclass(frozen=True)
class Proposal:
    """Drafts for S sequences."""

    tokens: jax.Array | np.ndarray
    """i32 [S, K], -1 where a sequence has no more drafts."""
    probabilities: jax.Array | None = None
    """f32 [S, K, V] if the drafts were sampled, None if they were chosen without chance."""


@runtime_checkable
class Drafter(Protocol):
    """Guesses what the target says next. Any guess is safe; a good one saves steps."""

    max_drafts: int
    """Most drafts per sequence that :meth:`propose` can make."""

    def reset(self, row: int) -> None:
        """Forgets a row, for a new sequence."""
        ...

    def extend(self, row: int, tokens: Sequence[int], features: jax.Array) -> None:
        """Takes the tokens that the target has consumed next, and their features [N, F, D]."""
        ...

    def propose(
        self,
        rows: Sequence[int],
        anchors: Sequence[int],
        sampling: Sampling,
        num_drafts: int,
    ) -> Proposal:
        """Drafts ``num_drafts`` (1..``max_drafts``) tokens after each anchor.

        An anchor is the token chosen last, which the target has not consumed; it follows what
        :meth:`extend` was given. Random draws use :data:`spec_dspark.verification.DRAFT_SALT` and
        the position of the token that is drafted.
        """
        ...
