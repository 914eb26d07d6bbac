"""One round of speculative decoding, with any model and any drafter.

The drafter guesses K tokens after each sequence's anchor (the token chosen last), the target judges
anchors and drafts in one verify step, the accepted ones and one further token are emitted, and the
target's state moves by what it consumed.

Letters: S sequences, K drafts of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import numpy as np
from kda_mla_kernels.model import Model, State
from kda_mla_kernels.sampling import Sampling, SamplingParams

from spec_dspark.drafter import Drafter
from spec_dspark.verification import accept

__all__ = ["Live", "Round", "run_round"]


@dataclass(frozen=True)
class Live:
    """A sequence between two rounds."""

    row: int
    """Its row of the model's state."""
    anchor: int
    """The token chosen last, not yet consumed."""
    position: int
    """Where the anchor stands."""
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Round:
    """What a round emitted, in the order of its sequences."""

    state: State
    emitted: tuple[tuple[int, ...], ...]
    """1..K + 1 tokens of each sequence; the last one is its next anchor."""
    drafted: tuple[int, ...]
    """How many drafts of each were judged."""


def run_round(
    model: Model,
    state: State,
    drafter: Drafter,
    live: Sequence[Live],
    max_drafts: int | None = None,
) -> Round:
    """Drafts, judges and commits once, for sequences in distinct rows.

    K is the largest number that the drafter, ``max_drafts``, the model's rows and the context of
    every sequence allow, and no more than were found; at 0 the round is a plain decode step.

    Args:
        state: consumed; the next one is in the result.
        max_drafts: what the caller wants at most, e.g. because few tokens are left to generate.

    Raises:
        ValueError: no sequences, more than the model has rows, or one at the end of its context.
    """
    num_drafts = _num_drafts(model, drafter, live, max_drafts)
    rows = [sequence.row for sequence in live]
    anchors = [sequence.anchor for sequence in live]
    positions = [sequence.position for sequence in live]
    sampling = Sampling.of([sequence.params for sequence in live])
    drafts, q = _propose(drafter, rows, anchors, sampling, num_drafts)

    # The rows of missing drafts are judged as token 0, and never accepted.
    fed = np.concatenate([np.array(anchors, np.int32)[:, None], np.maximum(drafts, 0)], axis=1)
    verified = model.verify(state, rows, fed.tolist(), positions)
    first = np.array(positions, np.int32) + 1
    judged = _accept()(drafts, verified.logits, sampling, first, q)
    accepted, tokens = np.asarray(judged.accepted), np.asarray(judged.tokens)
    state = model.commit(verified.state, (accepted + 1).tolist())
    for s, row in enumerate(rows):
        consumed = int(accepted[s]) + 1
        drafter.extend(row, fed[s, :consumed].tolist(), verified.features[s, :consumed])
    emitted = tuple(tuple(tokens[s, : accepted[s] + 1].tolist()) for s in range(len(rows)))
    return Round(state, emitted, tuple((drafts >= 0).sum(axis=1).tolist()))


def _num_drafts(
    model: Model, drafter: Drafter, live: Sequence[Live], max_drafts: int | None
) -> int:
    if not live:
        raise ValueError("a round needs at least one sequence")
    if len(live) > model.info.max_rows:
        raise ValueError(f"{len(live)} sequences exceed the model's {model.info.max_rows} rows")
    limit = model.info.max_context
    room = limit - 1 - max(sequence.position for sequence in live)
    if room < 1:
        raise ValueError(f"a sequence stands at the end of the context of {limit} tokens")
    wanted = drafter.max_drafts if max_drafts is None else min(max_drafts, drafter.max_drafts)
    return max(0, min(wanted, model.info.max_rows // len(live) - 1, room - 1))


def _propose(
    drafter: Drafter, rows: list[int], anchors: list[int], sampling: Sampling, num_drafts: int
) -> tuple[np.ndarray, jax.Array | None]:
    """Drafts [S, K] and their distributions, K cut to the longest draft that was made."""
    if num_drafts == 0:
        return np.zeros((len(rows), 0), np.int32), None
    proposal = drafter.propose(rows, anchors, sampling, num_drafts)
    drafts = np.asarray(proposal.tokens)
    longest = int((drafts >= 0).sum(axis=1).max())
    q = proposal.probabilities
    return drafts[:, :longest], None if q is None else q[:, :longest]


@cache
def _accept() -> Any:
    return jax.jit(accept)
